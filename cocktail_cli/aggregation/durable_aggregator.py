"""Aggregators whose error feedback e (and outer momentum) survives a crash, at the hub and at a peer.

Both log what moves e before the round is committed, and replay the log at the next start.

    hub   inherit     e moves by a leaver's handoff, in memory alone until the next aggregate
          aggregate   e moves; the updates, or their sum if shorter, are logged; the ledger commits the round
          start       e = error.safetensors, or 0, then each committed round since, from updates.log
    peer  aggregate   e moves; updates, packet and handoffs are logged; the packet goes to the hub
          settle      the round is committed, the handoffs join e; or undo: e is as before, the record is cut
          off start       e = <path>.errors.safetensors, or nothing, then each record of <path>.updates.log

The saved e is written only after a commit, so a logged round that was not committed never reached it. A hub
killed between an `inherit` and the next commit loses that handoff: the leaver is gone. A peer has no ledger:
the first update of its record, of no peer, is the packet itself, and whether its newest record was committed
is told by the hub's packet. Shards that it gives up stay on its disk until the hub has their e.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transport import Ledger
from transport.ledger import (
    ERROR_FEEDBACK,
    HUB,
    TAIL,
    UPDATES,
    PacketLog,
    RoundUpdates,
    UpdateLog,
    damaged_updates,
    pack_updates,
    read_rounds,
    read_updates,
    retired,
    scan_rounds,
    set_aside,
)
from transport.protocol import LedgerDamaged, LedgerError, ShardPacket, UpdateRejected, WeightedPacket

if TYPE_CHECKING:
    from recipes.algorithm import AggregateStep, Aggregator

SHARD_ERRORS, SHARD_UPDATES = ".errors.safetensors", ".updates.log"
LEAST_LOG = 64 << 20  # bytes of updates before e itself is saved; twice the size of e, if that is more
NEVER = 2**62  # beyond any round
GO_ON_WITHOUT = "or go on without it: cocktail resume RUN --drop-error-feedback"
SPARE = 2**14  # bytes of headers, and of the offsets of at most 1,024 shards

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
        self.given = 0  # number of the newest handoff of e to other aggregators that is not in e any more
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
        from recipes.algorithm import newest_given

        saved = self.folder / ERROR_FEEDBACK
        stamp = saved.stat().st_mtime_ns if saved.exists() else 0
        if stamp != self._loaded:
            try:
                self.saved, self.given = self.aggregator.load(saved), newest_given(saved)
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
        # A hub killed while it gave shards away has stored their e for others, and not yet dropped it here.
        twice = {n: one for n, one in ledger.handoffs.rows().items() if one.peer == HUB and n > self.given}
        if twice:
            self.given = max(twice)
            gone = frozenset().union(*(one.shards for one in twice.values()))
            self.aggregator.assign(set(self.aggregator.assigned) - gone)
            self._save(stop)
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
        self._save(stop)
        self._replayed = stop
        there = f"; what was there is in {kept}" if kept else ""
        return f"{why}. The aggregator begins with none, as it was told to{there}"

    def own(self, round: int, shards: Collection[int], keep: Callable[[bytes], int]) -> bool:
        """Aggregate exactly these shards from `round` on, and `keep` the e of those given up for others.

        Returns False where nothing has changed.
        """
        if set(shards) == set(self.aggregator.assigned):
            return False
        if errors := self.aggregator.assign(shards):
            self.given = keep(errors)
        self._save(round)
        self.inherited.clear()
        return True

    def _save(self, round: int) -> None:
        """Save e as it is before `round`, and clear the log that led to it."""
        assert self.log is not None, "recover first"
        self.aggregator.save(self.folder / ERROR_FEEDBACK, round, self.given)
        self.saved = round
        self.log.clear(round, self.keeps_cleared)

    def joined(self, round: int, own: bytes, parts: Sequence[ShardPacket]) -> bytes:
        """Join `own` and the packets of other aggregators into one of all shards. Raises UpdateRejected."""
        with rejections():
            return self.aggregator.assemble(round, own, parts)

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
            self._save(round + 1)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def forget(self) -> None:
        """Delete the files of a run that is over."""
        self.close()
        names = (UPDATES, retired(Path(UPDATES)).name, UPDATES + TAIL)
        for name in (*names, ERROR_FEEDBACK, ERROR_FEEDBACK + ".part"):
            (self.folder / name).unlink(missing_ok=True)


class DurableShards:
    """A peer's aggregator, as transport's AggregatorBackend: of no shard, until the hub or its files name
    some.

    Args:
        path: stem of both files.
    """

    def __init__(self, aggregator: Aggregator, path: Path, least: int = LEAST_LOG) -> None:
        self.aggregator, self.least = aggregator, least
        self.saved, self.records = (path.with_name(path.name + end) for end in (SHARD_ERRORS, SHARD_UPDATES))
        self.pending: tuple[int, bytes] | None = None  # the newest aggregate, until `settle` or `undo`
        self._handoffs: Sequence[WeightedPacket] = ()  # that join e once `pending` is committed
        self._next = 0  # the round before which e would be saved now
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log = PacketLog(self.records, scan_rounds(self.records, NEVER)[0])

    def recover(self) -> None:
        """Bring e to where it was. Raises ValueError where the files are damaged; OSError."""
        from recipes.algorithm import shards_in

        start = self._next = self.aggregator.load(self.saved) if self.saved.exists() else 0
        try:
            for record in read_updates(self.records, start):
                if self.pending is not None:
                    self._join()
                (_, packet, _), *updates = record.updates
                mine = shards_in(packet, len(self.aggregator.shards))
                # given up, and not yet at the hub
                self.aggregator.assign({*self.aggregator.assigned, *mine})
                self.aggregator.replay(record.round, updates, packet)
                self.pending, self._handoffs = (record.round, packet), record.inherited
        except LedgerError as error:
            raise ValueError(f"{self.records}: {error}") from error

    def own(self, shards: Sequence[int]) -> bytes:
        """Aggregate exactly these shards from now on; return the e of those given up."""
        return self.aggregator.assign(shards)

    def fits(self, size: int) -> None:
        """Limit the packet of all shards to `size` bytes from now on."""
        self.aggregator.set_budget(size)

    def longest(self, round: int) -> int:
        """Return the most bytes of an update of these shards in `round` or the next: FP32, indices."""
        mix, owned = self.aggregator.compressor, self.aggregator.assigned.values()
        return max(
            SPARE + sum(SPARE + 8 * mix.schedule(o.shard.size, o.shard.seed, r).m for o in owned)
            for r in (round, round + 1)
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
        with rejections():
            packet = self.aggregator.step(round, updates)
        sha256 = hashlib.sha256(packet).digest()
        try:
            self._log.append(round, *pack_updates([WeightedPacket("", packet, 0.0), *updates], left), sha256)
        except OSError:
            self.aggregator.undo()
            self._log.close()
            self._log = PacketLog(self.records, self._log.end, keep=False)
            raise
        self.pending, self._handoffs = (round, packet), left
        return packet

    def took(self, packet: bytes) -> bool:
        """Tell whether the newest aggregate is in this packet of all shards."""
        from recipes.algorithm import select_shards, shards_in

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
        self.aggregator.settle()
        for handoff in handoffs:
            try:
                self.aggregator.merge_handoff(*handoff)
            except RejectedUpdate as error:
                log.debug("a handoff", exc_info=error)

    def undo(self) -> None:
        """Note that the newest aggregate is not committed."""
        assert self.pending is not None
        self.aggregator.undo()
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
