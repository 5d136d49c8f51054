"""The owner's half of Algorithm 1 whose error e, and outer momentum, survive the hub: law 3, at the owner.

    between   inherit: e moves by what a leaver handed over; held in memory until the next aggregate
    round t   aggregate: e moves; what moves it is on the disk (updates.log)  ->  the ledger commits round t
    start     e = error.safetensors (or 0), then each committed round since, replayed from the log

A round that was logged and not committed is dropped by the log, and never reached the saved e, which is
written only after a commit. A hub that is killed between an `inherit` and the next commit loses that legacy:
the leaver is gone and cannot say it again. Both files lie in the ledger's folder, under the ledger's lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from transport import Ledger
from transport.ledger import HUB, RoundUpdates, UpdateLog, WeightedPacket
from transport.protocol import LedgerError, UpdateRejected

if TYPE_CHECKING:
    from recipes.algorithm import AggregateStep, Aggregator

ERROR = "error.safetensors"
UPDATES = "updates.log"
LEAST_LOG = 64 << 20  # bytes of updates before e itself is written; twice the size of e, if that is more


class KeptOwner:
    """Owners, and the books of their errors in `folder`."""

    def __init__(self, owner: Aggregator, folder: Path, least: int = LEAST_LOG) -> None:
        self.owner, self.folder = owner, folder
        self.longest = max(least, 2 * owner.nbytes)  # bytes of the log
        self.log: UpdateLog | None = None  # from `recover` on
        self.inherited: list[WeightedPacket] = []  # since the last aggregate
        self.given = 0  # the number of the newest estate that is not in e any more

    def recover(self, ledger: Ledger) -> None:
        """Bring e, which is 0 now, to where the ledger, open to write, stands. Call it before the hub starts.

        Raises:
            LedgerError: the ledger has rounds for which e cannot be had.
        """
        from recipes.algorithm import newest_given

        stop, start, saved = len(ledger.rounds()), 0, self.folder / ERROR
        if saved.exists():
            try:
                start, self.given = self.owner.load(saved), newest_given(saved)
            except ValueError as error:
                raise LedgerError(str(error)) from error
            if start > stop:
                raise LedgerError(f"{saved} is of round {start}, the ledger has {stop} rounds")
        self.log = UpdateLog(self.folder / UPDATES, stop)
        logged, committed = self.log.rounds(start, stop), ledger.packets(start, stop)
        for taken, (round, packet) in zip(logged, committed, strict=True):
            if taken.sha256 != hashlib.sha256(self.owner.part(packet)).digest():
                raise LedgerError(f"the logged updates of round {round} are not those it was committed with")
            for legacy in taken.inherited:
                self.owner.inherit(*legacy)
            self._again(taken, packet)
        self._forget_given(ledger, stop)

    def _again(self, taken: RoundUpdates, packet: bytes) -> None:
        """The round that was committed as `packet`."""
        if not taken.total:
            self.owner.replay(taken.round, taken.updates, packet)
            return
        try:
            self.owner.repeat(taken.round, taken.total, packet)
        except ValueError as error:
            raise LedgerError(str(error)) from error

    def _forget_given(self, ledger: Ledger, round: int) -> None:
        """A hub that was killed when it gave shards away had kept their errors for others, and not yet struck
        them out here."""
        twice = {n: left for n, left in ledger.estates.rows().items() if left.peer == HUB and n > self.given}
        if twice:
            self.given = max(twice)
            gone = frozenset().union(*(left.shards for left in twice.values()))
            self.owner.own(set(self.owner.owners) - gone)
            self._save(round)

    def own(self, round: int, shards: Collection[int], keep: Callable[[bytes], int]) -> bool:
        """From `round` on these shards are owned here; the errors of those that were are kept for others.
        False: they are the same as before. What is left is on the disk.
        """
        assert self.log is not None, "recover first"
        if set(shards) == set(self.owner.owners):
            return False
        if errors := self.owner.own(shards):
            self.given = keep(errors)
        self._save(round)
        self.inherited.clear()
        return True

    def _save(self, round: int) -> None:
        """e itself, as it is before `round`; nothing that led to it is needed any more."""
        assert self.log is not None
        self.owner.save(self.folder / ERROR, round, self.given)
        self.log.clear(round)

    def joined(self, round: int, own: bytes, parts: Sequence[tuple[str, Collection[int], bytes]]) -> bytes:
        """The packet of all shards: `own`, and what other owners have sent. Raises UpdateRejected."""
        from recipes.algorithm import RejectedUpdate

        try:
            return self.owner.joined(round, own, parts)
        except RejectedUpdate as error:
            raise UpdateRejected(error.peer, error.reason) from error

    def inherit(self, peer: str, packet: bytes, share: float) -> float:
        """e takes over a leaver's legacy: this share of it. Raises UpdateRejected, with nothing changed."""
        from recipes.algorithm import RejectedUpdate

        try:
            scale = self.owner.inherit(peer, packet, share)
        except RejectedUpdate as error:
            raise UpdateRejected(error.peer, error.reason) from error
        self.inherited.append(WeightedPacket(peer, packet, share))
        return scale

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """The packet C[D] of `round`; what went into it, or D where that is shorter, is on the disk, written
        while the packet was made. Raises UpdateRejected, with nothing changed and nothing logged."""
        from recipes.algorithm import RejectedUpdate

        assert self.log is not None, "recover first"
        log, left, few = self.log, self.inherited, self.few(round, updates)
        with ThreadPoolExecutor(1, "cocktail-updates") as beside:
            logged = beside.submit(log.begin, round, updates, left) if few else None
            flushed: list[Future[None]] = []

            def keep(found: Mapping[int, AggregateStep]) -> Callable[[], object]:
                job = logged or beside.submit(log.begin, round, (), left, self.owner.written(found))
                flushed.append(beside.submit(log.flush))
                return job.result

            try:
                packet = self.owner.aggregate(round, updates, keep)
            except RejectedUpdate as error:
                raise UpdateRejected(error.peer, error.reason) from error
        for job in flushed:
            job.result()
        self.log.seal(hashlib.sha256(packet).digest())
        self.inherited.clear()
        return packet

    def few(self, round: int, updates: Sequence[WeightedPacket]) -> bool:
        """Are these packets shorter than what they come to?"""
        return sum(len(packet) for _, packet, _ in updates) <= self.owner.moved_bytes(round)

    def committed(self, round: int) -> None:
        """The round is durable. Where what led to e has grown long, write down e itself."""
        assert self.log is not None
        if self.log.size > self.longest and not self.inherited:  # which the next round's record is to have
            self._save(round + 1)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def forget(self) -> None:
        """The run is over: e is of no more use."""
        self.close()
        for name in (UPDATES, ERROR, ERROR + ".part"):
            (self.folder / name).unlink(missing_ok=True)
