"""The errors of the shards that a peer owns, on its disk: law 3, at an owner that is not the hub.

    Close       aggregate: e moves; what went in, what came out and what is left to e is on the disk
                ->  the packet goes to the hub, which commits the round
    Committed   settle: what was left joins e.  Or undo: e is what it was, and the record is cut off
    start       e = ...errors.safetensors (or nothing), then each record of ...updates.log, replayed

Only of the newest record nobody knows whether its round was committed: the hub's packet tells (owning.py).
What is handed over stays here until the hub has it. The records are those of transport/update_log.py, where
the first update, of nobody, is the packet that came out: a peer has no ledger.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transport.ledger import (
    HEADER_SIZE,
    PacketLog,
    WeightedPacket,
    pack_updates,
    read_packets,
    scan_rounds,
    unpack_updates,
)
from transport.protocol import LedgerError, UpdateRejected

from .durable_aggregator import LEAST_LOG

if TYPE_CHECKING:
    from recipes.algorithm import Aggregator

ENDS = ".errors.safetensors", ".updates.log"
STOP = 2**62  # no round comes so late
SPARE = 2**14  # bytes: headers, and where each of at most 1,024 shards begins

log = logging.getLogger(__name__)


class KeptShards:
    """What transport's Owning calls a half. It owns nothing until the hub says so, or files say that it did.

    Args:
        path: of both files, without what their names end with.
        alike: peers count alike, whatever they deliver.
    """

    def __init__(
        self, owners: Aggregator, path: Path, least: int = LEAST_LOG, *, alike: bool = False
    ) -> None:
        self.owners, self.least, self.alike = owners, least, alike
        self.saved, self.records = (path.with_name(path.name + end) for end in ENDS)
        self.pending: tuple[int, bytes] | None = None  # the newest aggregate, while its end is not known
        self._left: Sequence[WeightedPacket] = ()  # to e, once that is committed
        self._begins = 0  # where its record does
        self._next = 0  # the round before which e itself would be written down now
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = PacketLog(self.records, scan_rounds(self.records, STOP)[0])

    def recover(self) -> None:
        """Bring e to where it was. Raises ValueError where the files are damaged; OSError."""
        from recipes.algorithm import shards_in

        start = self._next = self.owners.load(self.saved) if self.saved.exists() else 0
        try:
            with self.records.open("rb") as file:
                for round, payload in read_packets(file):
                    if round < start:
                        continue
                    if self.pending is not None:
                        self._join()
                    record = unpack_updates(round, payload)
                    (_, packet, _), *updates = record.updates
                    mine = shards_in(packet, len(self.owners.shards))
                    self.owners.own({*self.owners.owners, *mine})  # what was to be handed over is here still
                    self.owners.replay(round, updates, packet)
                    self.pending, self._left = (round, packet), record.inherited
                    self._begins = file.tell() - len(payload) - HEADER_SIZE
        except LedgerError as error:
            raise ValueError(f"{self.records}: {error}") from error

    def own(self, shards: Sequence[int]) -> bytes:
        """From now on these shards are owned here. Returns the errors of those that were."""
        return self.owners.own(shards)

    def fits(self, size: int) -> None:
        """From now on the packet of all shards should have no more bytes than this."""
        self.owners.fits(size)

    def longest(self, round: int) -> int:
        """Bytes that a part of the shards that are owned can have in `round` or the next: FP32 values, where
        they are, and words."""
        mix, owned = self.owners.mix, self.owners.owners.values()
        return max(
            SPARE + sum(SPARE + 8 * mix.walk(o.error.numel(), o.seed, r).m for o in owned)
            for r in (round, round + 1)
        )

    def handed(self) -> None:
        """The hub has all that `own` has returned."""
        self._save()
        if not self.owners.owners:
            self.saved.unlink()

    def aggregate(
        self, round: int, updates: Sequence[WeightedPacket], left: Sequence[WeightedPacket]
    ) -> bytes:
        """The packet of `round`; it, what went into it and what joins e with it are on the disk. Raises
        UpdateRejected, with nothing changed, and OSError."""
        from recipes.algorithm import RejectedUpdate, equal_weights

        updates = [WeightedPacket(*one) for one in equal_weights(updates)] if self.alike else updates
        try:
            packet = self.owners.aggregate(round, updates)
        except RejectedUpdate as error:
            raise UpdateRejected(error.peer, error.reason) from error
        begins, sha256 = self._log.end, hashlib.sha256(packet).digest()
        try:
            self._log.append(round, *pack_updates([WeightedPacket("", packet, 0.0), *updates], left), sha256)
        except OSError:
            self.owners.undo()
            self._log.close()
            self._log = PacketLog(self.records, begins)
            raise
        self.pending, self._left, self._begins = (round, packet), left, begins
        return packet

    def took(self, packet: bytes) -> bool:
        """Is the newest aggregate in this packet of all shards?"""
        from recipes.algorithm import select_shards, shards_in

        assert self.pending is not None
        ours, shards = self.pending[1], len(self.owners.shards)
        return select_shards(packet, shards_in(ours, shards), shards) == ours

    def settle(self) -> None:
        """The newest aggregate is in the run. Where what led to e has grown long, write down e itself."""
        self._join()
        if self._log.end > max(self.least, 2 * self.owners.nbytes):
            self._save()

    def _join(self) -> None:
        from recipes.algorithm import RejectedUpdate

        assert self.pending is not None
        left, self._left = self._left, ()
        self._next, self.pending = self.pending[0] + 1, None
        self.owners.settle()
        for legacy in left:
            try:
                self.owners.inherit(*legacy)
            except RejectedUpdate as error:
                log.debug("an estate", exc_info=error)

    def undo(self) -> None:
        """The newest aggregate is not in the run."""
        self.owners.undo()
        self.pending, self._left = None, ()
        self._log.cut(self._begins)

    def _save(self) -> None:
        """e itself. Records of rounds before are of no more use."""
        self.owners.save(self.saved, self._next)
        self._log.cut()

    def close(self) -> None:
        self._log.close()

    def forget(self) -> None:
        """What is on the disk is of no use."""
        self._log.cut()
        self.saved.unlink(missing_ok=True)
