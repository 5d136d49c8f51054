"""The global model x', what a packet says about it, and the CUDA stream on which it moves beside the compute.

All peers hold the same x', to the bit (law 2). Updates are brought to a device window by window: no more than
a window's temporaries are allocated there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress import (
    Arriving,
    Cocktail,
    PackedUpdate,
    Sample,
    Shard,
    Update,
    decode_packed,
    fingerprint,
    sampled,
    split,
    within,
)
from compress.backends import in_threads

# ---- updates on a device -----------------------------------------------------------------------------------

AT_ONCE = 1 << 20  # values on a processor, whose caches hold some of it; some 60 bytes of temporaries each
ON_GPU = 1 << 22  # values there, where a window costs some fifty launches
SMALL = 1 << 16  # values of a window where threads share them
LEAST = 1 << 10  # values of a window, where memory is short; a window begins with a multiple of it


def each_window(
    update: PackedUpdate | Update, device: torch.device, work: Callable[[Update], object]
) -> None:
    """Call `work` with every window of an update, on a device, in order.

    Where memory runs out, the same values are offered again in smaller windows: `work` is to change nothing
    before it has all its memory. So each value is worked in once.

    Raises:
        torch.OutOfMemoryError: even the smallest window does not fit.
    """
    start, size = 0, ON_GPU if device.type == "cuda" else AT_ONCE
    while start < update.count:
        stop = min(start + size, update.count)
        try:
            work(update.window(start, stop, device))
            start = stop
        except torch.OutOfMemoryError:
            if size <= LEAST:
                raise
            size //= 4


def each_part(count: int, work: Callable[[slice], object]) -> None:
    """Call `work` with parts of an update of `count` values, on the host, by threads and in any order."""
    # a packed update has parts from multiples of LEAST on
    size = max(AT_ONCE // torch.get_num_threads() // LEAST * LEAST, SMALL)
    in_threads(lambda start: work(slice(start, start + size)), range(0, count, size))


# ---- x' ----------------------------------------------------------------------------------------------------

WRAP = (1 << 64) - 1  # fingerprints are counted modulo 2**64


@dataclass(frozen=True)
class ShardUpdate:
    """The update of one shard: values for the coordinates that one round has sampled there."""

    shard: Shard
    sample: Sample
    update: PackedUpdate | Update  # k values at positions within the sample, on the host
    unsent: Tensor | None = None  # (m,) the part of d - C[d] on the sample that is to decay

    def add_(self, x: Tensor, alpha: int = 1) -> None:
        """x += alpha * the update, in place; x: (P,)."""
        part = self.shard.of(x)
        if x.device.type == "cpu" and isinstance(self.update, PackedUpdate):
            self.sample.add_(part, self.update, alpha)
        else:
            each_window(self.update, x.device, lambda window: self.sample.add_(part, window, alpha))


@dataclass(frozen=True)
class DecodedPacket:
    """A decoded packet: one sparse update per shard that moved."""

    packet: bytes
    shard_updates: tuple[ShardUpdate, ...]
    round: int


@dataclass(frozen=True)
class Part:
    """The ranges of x' that one machine of a replica holds: whole shards."""

    ranges: tuple[range, ...]
    size: int  # P, of all of x'


class GlobalModel:
    """The global model x', its round and its fingerprint. Only committed packets change it (law 1).

    Args:
        vector: (P,) float32, x' of `round`; changed in place.
        compressor: gives shards and samples; a packet says its own K and q, and by its m which p.
        seed: of the run; all peers sample the same coordinates from (seed, round).
        part: the vector is these ranges of x', one behind the other. Packets are then of its shards alone,
            and fingerprints of all parts add up to that of x'.
        richest: the compressors of the largest K that an aggregate may have, for each p; (): any.
    """

    def __init__(
        self,
        vector: Tensor,
        compressor: Cocktail,
        seed: int,
        round: int = 0,
        part: Part | None = None,
        richest: Sequence[Cocktail] = (),
    ) -> None:
        self.richest = richest
        self.vector, self.compressor, self.seed, self.round = vector, compressor, seed, round
        part = part or Part((range(vector.numel()),), vector.numel())
        self.size = part.size
        self.shards = within(compressor.cut(part.size, seed), part.ranges)
        # the newest schedule of each shard, and its sample
        self._drawn: dict[int, tuple[object, Sample]] = {}
        self.fingerprint = sum(fingerprint(s.of(vector), s.start + s.offset) for s in self.shards) & WRAP

    @property
    def fingerprint(self) -> int:
        """The fingerprint of x'; this waits until the newest change of it has left its device."""
        known, change = self._fingerprint
        return (known + change.value()) & WRAP

    @fingerprint.setter
    def fingerprint(self, known: int) -> None:
        self._fingerprint = known, Arriving(torch.zeros((), dtype=torch.int64))

    def samples(
        self, round: int | None = None, compressor: Cocktail | None = None
    ) -> Iterator[tuple[Shard, Sample]]:
        """Draw the sample of a round for each shard; None: of `self.round`, of the run's own p."""
        mix, round = compressor or self.compressor, self.round if round is None else round
        for shard in self.shards:
            yield shard, self._draw(shard, mix, round)

    def _draw(self, shard: Shard, compressor: Cocktail, round: int) -> Sample:
        """Draw the sample of a round, once for an update and the aggregate that follows it."""
        wanted = compressor.schedule(shard.size, shard.seed, round)
        known = self._drawn.get(shard.number)
        if known is None or known[0] != wanted:
            known = self._drawn[shard.number] = wanted, wanted.sample()
        return known[1]

    def decode(self, packet: bytes, round: int | None = None) -> DecodedPacket:
        """Decode and verify an update or the aggregate of a round, None: of `self.round`; changes nothing.
        Each shard's packet says by its m which of the run's p it has. Raises PacketError."""
        round, moved = self.round if round is None else round, list[ShardUpdate]()
        for shard, part in zip(self.shards, split(packet, len(self.shards)), strict=True):
            if part:
                mix = self.compressor.of_length(shard.size, shard.seed, round, sampled(part))
                sample = self._draw(shard, mix, round)
                most = (
                    one.most_kept(sample.m, round)
                    for one in self.richest
                    if one.schedule(shard.size, shard.seed, round).m == sample.m
                )
                update = decode_packed(part, sample.m, max(most, default=None))
                moved.append(ShardUpdate(shard, sample, update))
        return DecodedPacket(packet, tuple(moved), round)

    def apply(self, packet: bytes) -> DecodedPacket:
        """Decode the aggregate of `self.round` and move by it. Raises PacketError; x' is then unchanged."""
        aggregate = self.decode(packet)
        self.move(aggregate)
        return aggregate

    def move(self, aggregate: DecodedPacket) -> None:
        """x' <- x' + C[D] (line 7) with the aggregate of `self.round`; the fingerprint follows at the cost of
        what changed. No device is waited for."""
        changes = [change for update in aggregate.shard_updates for change in self._added(update)]
        if changes:
            total, *rest = changes
            for change in rest:  # in place: x' has moved, and a device may have no room left
                total.add_(change)
            self._fingerprint = self.fingerprint, Arriving(total)
        self.round += 1

    def _added(self, update: ShardUpdate) -> list[Tensor]:
        """Add an update to its shard of x'; return the changes of the fingerprint, part by part."""
        changes, values = list[Tensor](), update.update
        part, start = update.shard.of(self.vector), update.shard.start + update.shard.offset

        def add(window: PackedUpdate | Update, some: slice = slice(None)) -> None:
            changes.append(update.sample.add_counted_(part, window, start, self.size, some))

        if part.device.type == "cpu" and isinstance(values, PackedUpdate):
            each_part(values.count, partial(add, values))
        else:
            each_window(values, part.device, add)
        return changes


def replay(model: GlobalModel, packets: Iterable[bytes]) -> Iterator[GlobalModel]:
    """Apply packets in order: how a joiner, a snapshot and an export come by the model. Yields it before each
    packet, and after the last."""
    yield model
    for packet in packets:
        model.apply(packet)
        yield model


# ---- the stream of the exchange ----------------------------------------------------------------------------


class SideStream:
    """A stream of high priority on a device. What is made on it is used and freed on it; x_i and x' are both
    streams'."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """Mark what the compute's stream was asked so far, in the thread of the compute."""
        if self.stream is None:
            return None
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.stream.device))
        return event

    @contextmanager
    def behind(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Do work on this stream, behind a mark."""
        if self.stream is None or mark is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(mark)
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Do work on this stream, behind what the compute's was asked before, which then waits for it."""
        try:
            with self.behind(self.mark()):
                yield
        finally:
            self.rejoin()

    def rejoin(self) -> None:
        """Let the compute's stream wait for this one."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
