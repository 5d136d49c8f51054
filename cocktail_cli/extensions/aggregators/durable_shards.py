"""The model side of aggregators: the shards of a peer, whose error feedback e (and outer momentum) survives a
crash, and those that the hub keeps.

A peer logs what moves e before the round is committed, and replays the log at the next start.

    aggregate   e moves; updates, packet and handoffs are logged; the packet goes to the hub
    settle      the round is committed, the handoffs join e; or undo: e is as before, the record is cut off
    start       e = <path>.errors.safetensors, or nothing, then each record of <path>.updates.log

A peer has no ledger: the first update of its record, of no peer, is the packet itself, and whether its newest
record was committed is told by the hub's packet. Shards that it gives up stay on its disk until the hub has
their e.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.host import LEAST_LOG, rejections
from transport.ledger import PacketLog, pack_updates, read_updates, scan_rounds
from transport.protocol import LedgerError, UpdateRejected, WeightedPacket

from .bodies import ShardPacket
from .residual_handoffs import HandoffStore

if TYPE_CHECKING:
    from cocktail_cli.host import DurableAggregator
    from recipes.algorithm import Aggregator
    from recipes.config import Compression, Recipe

SHARD_ERRORS, SHARD_UPDATES = ".errors.safetensors", ".updates.log"
NEVER = 2**62  # beyond any round
SPARE = 2**14  # bytes of headers, and of the offsets of at most 1,024 shards

log = logging.getLogger(__name__)


class DurableShards:
    """A peer's aggregator: of no shard, until the hub or its files name some. One thread calls it.

    Args:
        path: stem of both files.
    """

    def __init__(self, aggregator: Aggregator, path: Path, least: int = LEAST_LOG) -> None:
        self.aggregator, self.least = aggregator, least
        self.saved, self.records = (path.with_name(path.name + end) for end in (SHARD_ERRORS, SHARD_UPDATES))
        self.pending: tuple[int, bytes] | None = None  # the newest aggregate, until `settle` or `undo`
        self._handoffs: Sequence[WeightedPacket] = ()  # that join e once `pending` is committed
        self._take_back: Callable[[], None] = lambda: None  # the newest step
        self._next = 0  # the round before which e would be saved now
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = PacketLog(self.records, scan_rounds(self.records, NEVER)[0])

    def recover(self) -> None:
        """Bring e to where it was. Raises ValueError where the files are damaged; OSError."""
        start = self._next = self.aggregator.load(self.saved) if self.saved.exists() else 0
        try:
            for record in read_updates(self.records, start):
                if self.pending is not None:
                    self._join()
                (_, packet, _), *updates = record.updates
                mine = shards_in(packet, len(self.aggregator.shards))
                # given up, and not yet at the hub
                self.aggregator.assign({*self.aggregator.assigned, *mine})
                self.aggregator.take_p_of(record.round, packet)
                self._take_back = before(self.aggregator, record.round)
                self.aggregator.replay(record.round, updates, packet)
                self.pending, self._handoffs = (record.round, packet), record.inherited
        except LedgerError as error:
            raise ValueError(f"{self.records}: {error}") from error

    def own(self, shards: Sequence[int]) -> bytes:
        """Aggregate exactly these shards from now on; return the e of those given up."""
        return self.aggregator.assign(shards)

    def opens(self, size: int, rung: int) -> None:
        """Limit the packet of all shards to `size` bytes from now on, on the round's rung."""
        self.aggregator.open(size, rung)

    def longest(self, round: int) -> int:
        """Return the most bytes of an update of these shards in `round` or the next: FP32, indices."""
        mixes, owned = self.aggregator.rate.richest, self.aggregator.assigned.values()
        return max(
            SPARE + sum(SPARE + 8 * mix.schedule(o.shard.size, o.shard.seed, r).m for o in owned)
            for r in (round, round + 1)
            for mix in mixes
        )

    def handed(self) -> None:
        """Note that the hub has all that `own` has returned."""
        self._save()
        if not self.aggregator.assigned:
            self.saved.unlink()

    def aggregate(
        self, round: int, updates: Sequence[WeightedPacket], left: Sequence[WeightedPacket]
    ) -> bytes:
        """Return the packet of `round`, logged with its updates and the handoffs `left` that join e with it.

        Raises UpdateRejected and OSError, with nothing changed.
        """
        self._take_back = before(self.aggregator, round)
        with rejections():
            packet = self.aggregator.step(round, updates)
        sha256 = hashlib.sha256(packet).digest()
        try:
            self._log.append(round, *pack_updates([WeightedPacket("", packet, 0.0), *updates], left), sha256)
        except OSError:
            self._take_back()
            self._log.close()
            self._log = PacketLog(self.records, self._log.end, keep=False)
            raise
        self.pending, self._handoffs = (round, packet), left
        return packet

    def took(self, packet: bytes) -> bool:
        """Tell whether the newest aggregate is in this packet of all shards."""
        from recipes.algorithm import select_shards

        assert self.pending is not None
        ours, shards = self.pending[1], len(self.aggregator.shards)
        return select_shards(packet, shards_in(ours, shards), shards) == ours

    def settle(self) -> None:
        """Note that the newest aggregate is committed; save e where the log has grown long."""
        self._join()
        if self._log.end > max(self.least, 2 * self.aggregator.nbytes):
            self._save()

    def _join(self) -> None:
        from recipes.algorithm import RejectedUpdate

        assert self.pending is not None
        handoffs, self._handoffs = self._handoffs, ()
        self._next, self.pending = self.pending[0] + 1, None
        self._take_back = lambda: None
        for handoff in handoffs:
            try:
                self.aggregator.merge_handoff(*handoff)
            except RejectedUpdate as error:
                log.debug("a handoff", exc_info=error)

    def undo(self) -> None:
        """Note that the newest aggregate is not committed."""
        assert self.pending is not None
        self._take_back()
        self._log.cut(scan_rounds(self.records, self.pending[0])[0])
        self.pending, self._handoffs = None, ()

    def _save(self) -> None:
        self.aggregator.save(self.saved, self._next)
        self._log.cut()

    def close(self) -> None:
        self._log.close()

    def forget(self) -> None:
        """Delete what is on the disk."""
        self._log.cut()
        self.saved.unlink(missing_ok=True)


def before(aggregator: Aggregator, round: int) -> Callable[[], None]:
    """Return what takes back a step of this round that is made next. To be called before another handoff is
    merged."""
    kept = [
        (shard.sample(round), vector, shard.sample(round).take(vector))
        for shard in aggregator.assigned.values()
        for vector in (shard.error, shard.momentum)
        if len(vector)
    ]
    figures = [(one, one.usual, one.recent, one.packets) for one in aggregator.assigned.values()]

    def take_back() -> None:
        for sample, vector, values in kept:
            sample.put_(vector, values)
        for one, usual, recent, packets in figures:
            one.usual, one.recent, one.packets = usual, recent, packets

    return take_back


def shard_backend(recipe: Recipe, parameters: int, path: Path, warn: Callable[[str], None]) -> DurableShards:
    """Make the aggregator of this peer's shards, with the error feedback that is stored at `path`."""
    from recipes.algorithm import aggregator_of

    def new() -> DurableShards:
        return DurableShards(aggregator_of(recipe, parameters, assigned=()), path)

    shards = new()
    try:
        shards.recover()
    except ValueError as problem:
        warn(f"the stored error feedback of this peer's shards is damaged and removed: {problem}")
        shards.forget()
        shards.close()
        shards = new()
    return shards


class HubAggregator:
    """The hub's aggregator, where it aggregates some of the shards."""

    def __init__(self, durable: DurableAggregator, store: HandoffStore) -> None:
        self._durable, self._aggregator, self._store = durable, durable.aggregator, store

    def own(self, round: int, shards: Sequence[int], keep: Callable[[bytes], int]) -> bool:
        """Aggregate exactly these shards from this round on.

        The error feedback of shards given up is passed to `keep`, which stores it for their next aggregators
        and returns its number; it is dropped here only after that. Returns False where nothing has changed.
        """
        if gone := self._store.not_given & self._aggregator.assigned.keys():
            self._aggregator.assign(self._aggregator.assigned.keys() - gone)
        elif set(shards) == set(self._aggregator.assigned):
            return False
        if errors := self._aggregator.assign(shards):
            keep(errors)
        self._durable.save(round)
        return True

    def joined(self, round: int, hubs: Sequence[int], own: bytes, parts: Sequence[ShardPacket]) -> bytes:
        """Join `own`, the packet of the hub's shards `hubs`, and the aggregators' packets into one of all
        shards. Raises UpdateRejected, whose `peer` is the `aggregator` at fault."""
        with rejections():
            return assemble(self._aggregator, round, own, parts) if parts else own

    def restricted(self, peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
        """Return a peer's packet of these shards only, and the ones that it moves. Raises UpdateRejected.
        From any thread."""
        from compress import PacketError
        from recipes.algorithm import select_shards

        count = len(self._aggregator.shards)
        try:
            part = select_shards(packet, shards, count)
            return part, shards_in(part, count)
        except PacketError as error:
            raise UpdateRejected(peer, str(error)) from error


def assemble(
    aggregator: Aggregator, round: int, own: bytes, others: Sequence[tuple[str, Collection[int], bytes]]
) -> bytes:
    """Assemble the packet of the whole vector.

    Args:
        own: the packet of the shards that are assigned to `aggregator`.
        others: (aggregator, its shards, its packet) for all other shards.

    Raises:
        RejectedUpdate: an aggregator's packet is not of its shards, or does not decode.
    """
    from compress import PacketError, decode_packed, join, split
    from recipes.algorithm import RejectedUpdate

    parts = split(own, len(aggregator.shards))
    for name, numbers, packet in others:
        for number in numbers:
            shard = aggregator.shards[number]
            try:
                parts[number] = split(packet, len(aggregator.shards))[number]
                decode_packed(parts[number], aggregator.compressor.schedule(shard.size, shard.seed, round).m)
            except PacketError as error:
                raise RejectedUpdate(name, f"as the aggregator of shard {number}: {error}") from error
    return join(parts)


def merge_packets(packets: Iterable[bytes], shards: int) -> bytes:
    """Merge the packets of several aggregators into that of all their shards. Raises PacketError."""
    from compress import join, split

    parts = [b""] * shards
    for packet in packets:
        parts = [new or old for old, new in zip(parts, split(packet, shards), strict=True)]
    return join(parts)


def shards_in(packet: bytes, shards: int) -> list[int]:
    """List the shards that a packet moves. Raises PacketError."""
    from compress import split

    return [number for number, part in enumerate(split(packet, shards)) if part]


def longest_errors(compression: Compression, parameters: int) -> int:
    """Return the most bytes of an aggregator's error feedback, of all shards: exact, as it is handed over."""
    from compress import joined_size
    from recipes.algorithm import compressor_of, handoff_compressor

    usual = compressor_of(compression)
    exact = replace(handoff_compressor(usual, 1.0), quant_bits=32)
    return joined_size([exact.longest(shard.size, 0) for shard in usual.cut(parameters, 0)])
