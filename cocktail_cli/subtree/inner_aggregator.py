"""The residual d_h of an inner hub, which survives a crash: an aggregator whose packets may be refused.

    aggregate   d_h <- d_h + D_h - C[d_h + D_h]; updates and packet are logged before the packet goes up
    settle      refused, or late: d_h <- d_h + C[d_h]; that is logged before the round is committed here
    start       d_h = <path>.residual.safetensors, or 0, then each record of <path>.sent.log

So the outcome of a round in this hub's ledger is known: a record says that its packet was refused, and none
that it was accepted. A newest record whose round is not in the ledger is `pending`: the parent knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.aggregation import LEAST_LOG, NEVER, rejections
from transport.ledger import PacketLog, pack_updates, read_updates, scan_rounds
from transport.protocol import LedgerError, WeightedPacket
from transport.tree import SentUpdate

if TYPE_CHECKING:
    from recipes.algorithm import Aggregator

RESIDUAL, SENT = ".residual.safetensors", ".sent.log"


class InnerAggregator:
    """d_h of all shards, in two files.

    Args:
        path: stem of both.
        equal: each peer's weight in the mean is the same.
    """

    def __init__(
        self, aggregator: Aggregator, path: Path, least: int = LEAST_LOG, equal: bool = False
    ) -> None:
        self.aggregator, self.equal = aggregator, equal
        self.least = max(least, 2 * aggregator.nbytes)
        self.saved, self.records = (path.with_name(path.name + end) for end in (RESIDUAL, SENT))
        self.pending: SentUpdate | None = None  # the newest packet, until `settle`
        self._inherited: list[WeightedPacket] = []  # handoffs since the last packet
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = PacketLog(self.records, scan_rounds(self.records, NEVER)[0])

    def recover(self, rounds: int) -> None:
        """Bring d_h to where it was; the ledger has so many rounds. Raises LedgerError."""
        try:
            start = self.aggregator.load(self.saved) if self.saved.exists() else 0
        except ValueError as error:
            raise LedgerError(str(error)) from error
        for record in read_updates(self.records, start):
            (sender, packet, _), *updates = record.updates
            if not updates:  # the packet of before was refused
                self.aggregator.take_back(record.round, packet)
                assert self.pending is not None
                self.pending = self.pending._replace(accepted=False)
                continue
            for handoff in record.inherited:
                self.aggregator.merge_handoff(*handoff)
            self.aggregator.replay(record.round, updates, packet)
            self.pending = SentUpdate(record.round, packet, sender, tuple(one.peer for one in updates))
        if self.pending is not None and self.pending.round < rounds:
            self.pending = None

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Decode an update before its round closes."""
        self.aggregator.add(round, peer, packet)

    def fits(self, size: int) -> None:
        """Limit the next packets to `size` bytes."""
        self.aggregator.set_budget(size)

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Merge a share of a leaver's handoff into d_h. Raises UpdateRejected, with nothing changed."""
        with rejections():
            self.aggregator.merge_handoff(peer, packet, share)
        self._inherited.append(WeightedPacket(peer, packet, share))

    def aggregate(self, round: int, updates: Sequence[WeightedPacket], sender: str) -> bytes:
        """Add the updates to d_h, and return C[d_h], logged. Raises UpdateRejected, with nothing changed."""
        from recipes.algorithm import equal_weights

        if self.equal:
            updates = [WeightedPacket(*one) for one in equal_weights(updates)]
        with rejections():
            packet = self.aggregator.step(round, updates)
        self._append(round, [WeightedPacket(sender, packet, 0.0), *updates], self._inherited)
        self._inherited = []
        self.pending = SentUpdate(round, packet, sender, tuple(one.peer for one in updates))
        return packet

    def settle(self, accepted: bool) -> None:
        """Note that the newest packet is in x', or take it back into d_h."""
        sent, self.pending = self.pending, None
        assert sent is not None
        self.aggregator.settle()
        if not accepted:
            self._append(sent.round, [WeightedPacket(sent.sender, sent.packet, 0.0)])
            self.aggregator.take_back(sent.round, sent.packet)

    def committed(self, round: int) -> None:
        """Note that this round is in the ledger; save d_h where the log has grown long."""
        if self._log.end > self.least and not self._inherited:
            self.aggregator.save(self.saved, round + 1)
            self._log.cut()

    def close(self) -> None:
        self._log.close()

    def _append(
        self, round: int, updates: Sequence[WeightedPacket], inherited: Sequence[WeightedPacket] = ()
    ) -> None:
        digest = hashlib.sha256(updates[0].packet).digest()
        self._log.append(round, *pack_updates(updates, inherited), digest)
