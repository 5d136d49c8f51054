"""The hub's threads for slow work.

The commit thread does what must happen in order: aggregate, make durable, tell.

The reader thread reads objects for peers, what a round waits for first. Everything else (files, and ranges of
the log, for those who join) is read for one origin after the other, while rounds go on within a rate in all.
What is sent to newcomers and has not arrived is known at each look at all connections; until the next one no
more is read than there is room for. So whoever fetches much, or reads nothing of it, delays others who fetch
much, and neither a round nor the hub's memory.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from transport import actions as do
from transport.actions import Abandoned, Shell
from transport.ledger import Counted, Ledger, RoundRow
from transport.protocol import HubDelegate, UpdateRejected, WeightedPacket, sample_ids
from transport.scheduling import CommitSeconds, Rounds, Sums, round_figures
from transport.transfer import ChunkBuffer, ObjectStore
from transport.wire import FairQueue, TokenBucket

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BESIDE_ROUNDS = 128 << 20  # bytes a second that are read for joiners, all together, while rounds go on
BURST_S = 0.25  # seconds of that rate at once
ROOM, LEAST = 32 << 20, 4 << 20  # bytes that are on their way to newcomers; that are read between two looks

log = logging.getLogger(__name__)
Job = Callable[[], object]


class CommitThread:
    """Commit thread of one hub."""

    def __init__(
        self,
        ledger: Ledger,
        delegate: HubDelegate,
        objects: ObjectStore,
        rounds: Rounds,
        shell: Shell,
    ) -> None:
        self._ledger, self._delegate, self._objects = ledger, delegate, objects
        self._rounds, self._shell = rounds, shell
        self._sums = Sums(delegate.aggregate, delegate.inherit, delegate.committed)
        for one in rounds.extensions:
            self._sums = one.sums(self._sums)
        self._bounds = rounds.settings.bounds
        self.opened: dict[int, float] = {}  # round -> wall clock
        self._written = 0  # changes of the ledger that were told
        self._jobs = deque[Job]()  # of rounds, in order
        self._beside = deque[Job]()  # of single peers, in order
        self._thread = ThreadPoolExecutor(1, "cocktail-commit")

    # ---- any thread ----------------------------------------------------------------------------------------

    def later(self, job: Job) -> None:
        """Run a job in the commit thread, after those it was given before."""
        self._jobs.append(job)
        self._thread.submit(self._run)

    def beside(self, job: Job) -> None:
        """Run a job that concerns one peer: after those given before in this way, and behind all others."""
        self._beside.append(job)
        self._thread.submit(self._run)

    def shutdown(self) -> None:
        self._thread.shutdown()

    # ---- the commit thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the next job: there is one for each call. An error in it ends the run, with its reason."""
        try:
            (self._jobs or self._beside).popleft()()
            self._tell_written()
        except Exception as error:
            reason, code = f"{type(error).__name__}: {error}", 1
            if getattr(error, "errno", None) in FULL or "disk is full" in str(error):  # SQLite's words
                reason, code = "the hub's disk is full", 8
            elif isinstance(error, MemoryError):
                reason, code = "the hub's memory is full", 8
            self._shell.fail(error, reason, code)

    def _tell_written(self) -> None:
        """Pass on that the ledger has changed, where an extension copies it."""
        if any(one.copies for one in self._rounds.extensions) and self._written != self._ledger.changes:
            self._written, rounds = self._ledger.changes, self._ledger.next_round
            self._shell.apply(lambda _: self._rounds.wrote(rounds))

    def write_leases(self, action: do.Lease) -> None:
        self._delegate.opens(action.fits, action.rung)
        self._ledger.leased(action.round, action.leases, action.sessions)
        self._shell.apply(lambda _: self._rounds.leased(action.round))

    def inherit(self, action: do.Inherit, parts: ChunkBuffer) -> None:
        """Merge a leaver's handoff."""
        try:
            self._sums.inherit(action.peer, parts.data(), action.share)
        except UpdateRejected as error:
            self._shell.warn(error.peer, f"its handoff cannot be used: {error.reason}")

    def _bodies(
        self, round: int, counted: Sequence[Counted], took: CommitSeconds
    ) -> dict[str, dict[str, bytes]]:
        """Return what extensions add to the Committed of each session."""
        found: dict[str, dict[str, bytes]] = {}
        for one in self._rounds.extensions:
            for session, body in one.counted(round, counted, took).items():
                found.setdefault(session, {})[one.name] = body
        return found

    def commit(self, action: do.Commit, opened: dict[str, Future[bytes]]) -> None:
        """Aggregate, make durable, tell the I/O thread, in this order. `opened`: packets by session."""
        started = time.monotonic()
        packets = {session: packet.result() for session, packet in opened.items()}
        ids = {c.peer: [i for ranges in c.leases.values() for i in sample_ids(ranges)] for c in action.claims}
        tokens = {peer: self._delegate.tokens(of) for peer, of in ids.items()}
        weights = {peer: self._delegate.weight(of) for peer, of in ids.items()}
        claims = {c.peer: c for c in action.claims if c.peer not in action.refused}
        if any(weights.values()):
            # An update that delivers no work would get weight 0 and be lost: it stays a residual.
            claims = {peer: c for peer, c in claims.items() if weights[peer]}
        rejected, packet = dict(action.refused), b""
        while claims and not packet:
            equal = not any(weights[peer] for peer in claims)  # nothing trained yet: equal weights
            updates = [
                WeightedPacket(peer, packets.get(c.session, b""), 1.0 if equal else weights[peer])
                for peer, c in claims.items()
            ]
            try:
                if not (packet := self._sums.aggregate(action.round, updates)):
                    break
            except Abandoned:
                return
            except UpdateRejected as error:
                rejected[error.peer] = error.reason
                if claims.pop(error.peer, None) is None:
                    raise
        done = do.CommitDone(round=action.round, rejected=rejected)
        if not packet:
            self._shell.apply(lambda now: self._rounds.committed(done, now))
            return
        accepted = tuple(claims.values())
        said = {c.peer: (c.loss_sum, c.tokens, c.figures) for c in accepted if c.tokens or c.leases}
        terms = {peer: int(weights[peer]) for peer in said}  # of the loss, as the hub counts them
        figures = round_figures(said, terms, self._bounds, action.last_loss)
        row = RoundRow(
            round=action.round,
            step=action.step,
            opened=self.opened.pop(action.round, time.time()),
            committed=time.time(),
            fingerprint=action.fingerprints.get(action.round, 0),
            members=action.members,
            accepted=tuple(claims),
            loss=figures.loss,
            tokens=sum(tokens[peer] for peer in claims),
        )
        counted = tuple(
            Counted(r, c.peer, c.session, ranges, c.key) for c in accepted for r, ranges in c.leases.items()
        )
        notes = {one.name: text for one in self._rounds.extensions if (text := one.noted(action.round))}
        notes |= action.rung.note() if action.rung is not None else {}
        summed = time.monotonic()
        row = self._ledger.commit(row, packet, counted, notes, action.fingerprints)
        took = CommitSeconds(summed - started, time.monotonic() - summed)
        self._objects.committed(action.round, packet, row.sha256)
        durable = replace(
            done,
            size=len(packet),
            sha256=row.sha256,
            packets={peer: len(packets.get(c.session, b"")) for peer, c in claims.items()},
            tokens={peer: tokens[peer] for peer in claims},
            loss=figures.loss,
            figures=figures.further,
            impossible=figures.impossible,
            weights={peer: weights[peer] for peer in claims},
            extra=self._bodies(action.round, counted, took),
        )
        self._tell_written()
        self._shell.apply(lambda now: self._rounds.committed(durable, now))
        self._sums.committed(action.round, packet)


@dataclass(frozen=True)
class Reading:
    """A reading that is asked for."""

    job: Job
    size: int  # bytes
    urgent: bool  # a round waits for it
    origin: str
    payer: str  # session


class ReaderThread:
    """One thread. `busy`: tells whether rounds go on."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._urgent = deque[Job]()
        self._others = FairQueue[Reading]()
        self._bucket = TokenBucket(BESIDE_ROUNDS, BURST_S)
        self._changed = threading.Condition()
        self._room = ROOM  # bytes that are left until the next look
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cocktail-reader", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Run a job of the hub's own, after those that are urgent already."""
        with self._changed:
            self._urgent.append(job)
            self._changed.notify()

    def read(self, reading: Reading) -> None:
        with self._changed:
            if reading.urgent:
                self._urgent.append(reading.job)
            else:
                self._others.put(reading.origin, reading.payer, reading)
            self._changed.notify()

    def replenish(self, held: int) -> None:
        """Make room for more, where so many bytes are on their way to newcomers."""
        with self._changed:
            self._room = max(LEAST, ROOM - held)
            if self._others.count:
                self._changed.notify()

    def forget(self, origin: str, payer: str) -> None:
        """Drop what a session that is over has asked for, but for what is urgent."""
        with self._changed:
            self._others.drop(origin, payer)

    def shutdown(self) -> None:
        """End the thread after the job under way; others are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # a job answers its peer itself; this one's error concerns nobody else
                log.debug("in the reader thread", exc_info=True)

    def _next(self) -> Job | None:
        """Wait for the next job; None: the thread is to end."""
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                if self._urgent:
                    return self._urgent.popleft()
                wait: float | None = None
                if self._others.count and self._room > 0:
                    wait = max(0.0, self._bucket.open_at(now) - now) if self._busy() else 0.0
                    if not wait:
                        reading = self._others.take()
                        self._bucket.take(reading.size, now)
                        self._room -= reading.size
                        return reading.job
                self._changed.wait(wait)
            return None
