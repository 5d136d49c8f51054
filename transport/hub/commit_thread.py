"""The hub's commit thread: slow work that must happen in order. Aggregate, make durable, tell."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from transport import actions as do
from transport.actions import Abandoned, Shell
from transport.ledger import Counted, Ledger
from transport.protocol import HubDelegate, UpdateRejected, WeightedPacket, sample_ids
from transport.scheduling import CommitSeconds, RoundFigures, Rounds, Sums, round_figures, row_of
from transport.transfer import ChunkBuffer, ObjectStore

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        self._jobs = deque[Callable[[], object]]()  # of rounds, in order
        self._beside = deque[Callable[[], object]]()  # of single peers, in order
        self._thread = ThreadPoolExecutor(1, "cocktail-commit")

    # ---- any thread ----------------------------------------------------------------------------------------

    def later(self, job: Callable[[], object]) -> None:
        """Run a job in the commit thread, after those it was given before."""
        self._jobs.append(job)
        self._thread.submit(self._next)

    def beside(self, job: Callable[[], object]) -> None:
        """Run a job that concerns one peer: after those given before in this way, and behind all others."""
        self._beside.append(job)
        self._thread.submit(self._next)

    def shutdown(self) -> None:
        self._thread.shutdown()

    # ---- the commit thread ---------------------------------------------------------------------------------

    def _next(self) -> None:
        """Run the next job: there is one for each call."""
        self._guarded((self._jobs or self._beside).popleft())

    def _guarded(self, job: Callable[[], object]) -> None:
        """Run a job; an error in it ends the run, with its reason."""
        try:
            job()
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

    def _figures(
        self, action: do.Commit, accepted: Sequence[do.Claim], terms: Mapping[str, float]
    ) -> RoundFigures:
        """Compute a round's figures from what its peers say. `terms`: of the loss, as the hub counts them."""
        of = {c.peer: (c.loss_sum, c.tokens, c.figures) for c in accepted if c.tokens or c.leases}
        counted = {peer: int(terms[peer]) for peer in of}
        return round_figures(of, counted, self._bounds, action.last_loss)

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
        opened_at = self.opened.pop(action.round, time.time())
        figures = self._figures(action, accepted, weights)
        counted_tokens, times = sum(tokens[peer] for peer in claims), (opened_at, time.time())
        row = row_of(action, accepted, figures.loss, counted_tokens, times)
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
