"""The hub's aggregator, whose error feedback e (and outer momentum) survives a crash.

It logs what moves e before the round is committed, and replays the log at the next start.

    inherit     e moves by a leaver's handoff, in memory alone until the next aggregate
    aggregate   e moves; the updates, or their sum if shorter, are logged; the ledger commits the round
    start       e = error.safetensors, or 0, then each committed round since, from updates.log

The saved e is written only after a commit, so a logged round that was not committed never reached it. A hub
killed between an `inherit` and the next commit loses that handoff: the leaver is gone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transport import Ledger
from transport.ledger import (
    ERROR_FEEDBACK,
    TAIL,
    UPDATES,
    RoundUpdates,
    UpdateLog,
    damaged_updates,
    read_rounds,
    retired,
    set_aside,
)
from transport.protocol import LedgerDamaged, LedgerError, UpdateRejected, WeightedPacket

if TYPE_CHECKING:
    from recipes.algorithm import AggregateStep, Aggregator

LEAST_LOG = 8 << 20  # bytes of updates, replayed at a start, before e is saved; twice the size of e, if more
GO_ON_WITHOUT = "or go on without it: cocktail resume RUN --drop-error-feedback"

log = logging.getLogger(__name__)


@contextmanager
def rejections() -> Iterator[None]:
    """Turn the algorithm's RejectedUpdate into transport's UpdateRejected."""
    from recipes.algorithm import RejectedUpdate

    try:
        yield
    except RejectedUpdate as error:
        raise UpdateRejected(error.peer, error.reason) from error


class DurableAggregator:
    """The hub's aggregator, with files in the ledger's folder and under its lock."""

    def __init__(self, aggregator: Aggregator, folder: Path, least: int = LEAST_LOG) -> None:
        self.aggregator, self.folder = aggregator, folder
        self.longest = max(least, 2 * aggregator.nbytes)  # bytes of the log before e is saved
        self.log: UpdateLog | None = None  # from `recover` on
        self.inherited: list[WeightedPacket] = []  # handoffs since the last aggregate
        self.saved = 0  # the round before which e on the disk is
        self.keeps_cleared = False  # updates, once more: who copies them may lack the newest
        self._replayed = 0  # rounds that `follow` has in e
        self._loaded = 0  # stamp of the file that it began with

    def follow(self, ledger: Ledger, stop: int) -> None:
        """Bring e to where it is before round `stop`, from where an earlier call has brought it. Who is
        to take over does so with each round, as it has no time then.

        Raises LedgerError where e cannot be rebuilt.
        """
        start = self._load()
        if start > stop:
            raise LedgerError(
                f"{self.folder / ERROR_FEEDBACK} is of round {start}, the ledger has {stop} rounds"
            )
        logged, committed = read_rounds(self.folder / UPDATES, start, stop), ledger.packets(start, stop)
        for record, (round, packet) in zip(logged, committed, strict=True):
            self._replay(record, round, packet)
            self._replayed = round + 1

    def _load(self) -> int:
        """Take over e from its file, if that has changed; return the round that e is before."""
        saved = self.folder / ERROR_FEEDBACK
        stamp = saved.stat().st_mtime_ns if saved.exists() else 0
        if stamp != self._loaded:
            try:
                self.saved = self.aggregator.load(saved)
            except ValueError as error:
                raise damaged_updates(saved, f"it cannot be used ({error})") from error
            self._replayed, self._loaded = self.saved, stamp
        return self._replayed

    def _replay(self, record: RoundUpdates, round: int, packet: bytes) -> None:
        if record.sha256 != hashlib.sha256(self.aggregator.select(packet)).digest():
            why = f"the updates of round {round} are not those it was committed with"
            raise damaged_updates(self.folder / UPDATES, why)
        for handoff in record.inherited:
            self.aggregator.merge_handoff(*handoff)
        if not record.total:
            self.aggregator.replay(record.round, record.updates, packet)
            return
        try:
            self.aggregator.replay_step(record.round, record.total, packet)
        except ValueError as error:
            raise damaged_updates(self.folder / UPDATES, str(error)) from error

    def recover(self, ledger: Ledger, drop: bool = False) -> list[str]:
        """Bring e to where the ledger stands.

        Args:
            drop: begin with e = 0 where it cannot be rebuilt; the files are copied to aside/<n> before.

        Returns a sentence for what was dropped. Raises LedgerDamaged where e cannot be rebuilt.
        """
        stop, said = ledger.next_round, list[str]()
        try:
            self.log = UpdateLog(self.folder / UPDATES, stop, self._load())
            self.follow(ledger, stop)
        except LedgerDamaged as error:
            if not drop:
                raise LedgerDamaged(str(error), (*error.hints, GO_ON_WITHOUT)) from None
            said.append(self._begin_anew(stop, str(error)))
        return said

    def _begin_anew(self, stop: int, why: str) -> str:
        """Begin with e = 0 before round `stop`, as what led to it is lost."""
        if self.log is not None:
            self.log.close()
        kept = set_aside(self.folder, UPDATES, ERROR_FEEDBACK)
        for name in (UPDATES, ERROR_FEEDBACK):
            (self.folder / name).unlink(missing_ok=True)
        self.aggregator.reset()
        self.log = UpdateLog(self.folder / UPDATES, 0)
        self.save(stop)
        self._replayed = stop
        there = f"; what was there is in {kept}" if kept else ""
        return f"{why}. The aggregator begins with none, as it was told to{there}"

    def save(self, round: int) -> None:
        """Save e as it is before `round`, and clear the log that led to it."""
        assert self.log is not None, "recover first"
        self.inherited.clear()
        self.aggregator.save(self.folder / ERROR_FEEDBACK, round)
        self.saved = round
        self.log.clear(round, self.keeps_cleared)

    def inherit(self, peer: str, packet: bytes, share: float) -> float:
        """Merge a share of a leaver's handoff into e. Raises UpdateRejected, with nothing changed."""
        with rejections():
            scale = self.aggregator.merge_handoff(peer, packet, share)
        self.inherited.append(WeightedPacket(peer, packet, share))
        return scale

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """Return the packet C[D] of `round`, with the updates on the disk, or D where that is shorter.

        They are written while the packet is made. Raises UpdateRejected, with nothing changed or logged.
        """
        assert self.log is not None, "recover first"
        update_log, inherited = self.log, self.inherited
        short = sum(len(one.packet) for one in updates) <= self.aggregator.step_bytes(round)
        with ThreadPoolExecutor(1, "cocktail-updates") as writer:
            logged = writer.submit(update_log.begin, round, updates, inherited) if short else None
            flushed: list[Future[None]] = []

            def keep(found: Mapping[int, AggregateStep]) -> Callable[[], object]:
                written = logged or writer.submit(
                    update_log.begin, round, (), inherited, self.aggregator.serialize(found)
                )
                flushed.append(writer.submit(update_log.flush))
                return written.result

            with rejections():
                packet = self.aggregator.step(round, updates, keep)
        for job in flushed:
            job.result()
        update_log.seal(hashlib.sha256(packet).digest())
        inherited.clear()
        return packet

    def committed(self, round: int) -> None:
        """Note that the round is durable; save e where the log has grown long."""
        assert self.log is not None
        if self.log.size > self.longest and not self.inherited:  # which belong to the next round's record
            self.save(round + 1)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def forget(self) -> None:
        """Delete the files of a run that is over."""
        self.close()
        names = (UPDATES, retired(Path(UPDATES)).name, UPDATES + TAIL)
        for name in (*names, ERROR_FEEDBACK, ERROR_FEEDBACK + ".part"):
            (self.folder / name).unlink(missing_ok=True)
