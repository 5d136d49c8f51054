"""The hub without sockets, disk and clock: facts in, actions out, `now` (monotonic seconds) an argument.

    WAITING -> OPENING   min_peers are ready: samples are leased, the ledger hears of it first
    OPENING -> OPEN      the members are told
    OPEN -> CLOSED       all expected updates are here, or the deadline (pace.py) has passed and one is
    CLOSED -> WAITING    aggregated, durable, announced; the next round opens at once
    OPEN -> WAITING      nobody is left, or no packet can be used: the round is opened again
    WAITING -> FINAL     every sample is counted
    FINAL -> ENDED       the result is evaluated

Every method that takes something in returns the actions it causes. `deadline()` says when to call `tick` at
the latest. The tables are PHASES (rounds.py) and NEXT (sessions.py); the books are Leases (leases.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transport import actions as do
from transport.aggregators import shard_coordinator
from transport.ledger import Recovered
from transport.membership import Admission, Kind, Members, Outbox, Session, State
from transport.protocol import (
    AskAdmin,
    AskStatus,
    AskStop,
    Evaluated,
    Hello,
    Holds,
    Leave,
    Over,
    Pong,
    Ready,
    Refused,
    Report,
    Resigns,
    Resume,
    RunSettings,
    ToHub,
    Unusable,
    count_samples,
    events,
)
from transport.scheduling import PHASES, Evaluations, Exchange, Leases, Pace, Phase, Speeds

from .admin_commands import ordered
from .final_evaluation import evaluated, finish_or_wait
from .handshake import greet, said_ready
from .round_history import History
from .round_opening import TELL_S, open_or_wait
from .upload_checks import inherit, strike

SHOWN = 8  # rounds named in a warning
LOOK_S = 0.02  # seconds; whom a round waits for is a matter of every member
STALE = 4  # rounds after which a lease that a peer's accepted updates did not deliver is given to others


class HubState:
    """The machine of one run."""

    def __init__(
        self,
        settings: RunSettings,
        token: str,
        stop_secret: str,
        now: float,
        recovered: Recovered | None = None,
    ) -> None:
        recovered = recovered or Recovered()
        evaluation = recovered.evaluation
        self.settings, self.phase = settings, Phase.WAITING
        self.term, self.replaced = recovered.term, False  # replaced: peers have met a hub of a later term
        self.round = recovered.round  # the next one to be committed
        self.leases = Leases(settings.samples, recovered.counted)
        self.evaluations = Evaluations(
            settings.eval,
            settings.eval_every,
            evaluation.step if evaluation else -1,
            bool(evaluation and evaluation.final),
        )
        self.out = Outbox()
        self.members = Members(settings, self.out, self._session_ended, now)
        self.admission = Admission(settings, self.out, recovered.peers)
        self.exchange: Exchange | None = None
        self.estates = dict(recovered.estates)  # by number
        self.pace, self.speeds = Pace(settings.step_timeout), Speeds()
        self.history = History(recovered)
        self.started = now
        self.counted_at_start = self.leases.counted
        self.finished, self.reason = False, ""  # how the run ended
        self.resumable = False  # it failed, or is paused: its owner may start it again
        self.token, self.stop_secret = token, stop_secret
        self._stop_at: float | None = None  # when a stop that waits for the exchange stops waiting
        self.paused = False  # it is the owner who stops it, and he means to go on
        self.waiting_since = self._ticked = self.hold_until = now
        self.told_of_waiting = False
        self.members.recall(known.key for known in recovered.peers)
        for old in recovered.sessions:
            self.hold_until = now + settings.recover_s
            trained = bool(old.leases) or any(old.name in row.members for row in recovered.recent)
            self.members.restore(old, now, awaited=trained)
            for lease_round, ids in old.leases.items():
                self.leases.restore(old.session, lease_round, ids)
            self.pace.recover(old.session, old.name, recovered.recent)

    # ---- in: from peers ------------------------------------------------------------------------------------

    def receive(self, conn: bytes, message: ToHub, now: float) -> list[do.Action]:
        """A checked message from a control connection."""
        session = self.members.by_conn(conn)
        if session is not None:
            session.seen = now
        if isinstance(message, Hello | Resume | AskStatus | AskStop):
            greet(self, conn, message, now)
        elif isinstance(message, AskAdmin):
            ordered(self, conn, message, now)
        elif session is None:
            if not self.admission.heard(conn, message, now):
                self.out.send(conn, Refused("session", "the hub does not know this session"))
        elif isinstance(message, Ready):
            said_ready(self, session, message, now)
        elif isinstance(message, Report):
            self._report(session, message, now)
        elif isinstance(message, Evaluated):
            evaluated(self, session, message)
        elif isinstance(message, Holds | Unusable | Resigns):
            shard_coordinator.heard(self, session, message, now)
        elif isinstance(message, Leave):
            self.out.send(conn, Over(f"left: {message.reason}", self.finished))
            self.members.end(session, f"left: {message.reason}")
        elif isinstance(message, Pong):
            session.rtt = max(0.0, now - message.sent)
        else:
            self.members.ignored += 1
        return self._drain(now)

    def lost(self, conn: bytes, now: float) -> list[do.Action]:
        """The connection is closed."""
        self.members.lost(conn, now)
        self.admission.gone(conn)
        return self._drain(now)

    def uploaded(self, session_id: str, round: int, now: float) -> list[do.Action]:
        """The packet of this session for `round` is here, whole."""
        session, ex = self.members.get(session_id), self.exchange
        if session and ex and self.phase is Phase.OPEN and ex.round == round and session_id in ex.members:
            session.seen = now
            ex.uploads.add(session_id)
            self.maybe_arrived(session, ex, now)
        return self._drain(now)

    def about_owners(self, fact: Callable[[HubState], None], now: float) -> list[do.Action]:
        """Something has happened that sharding.py has to do with."""
        fact(self)
        return self._drain(now)

    def handed_over(self, session_id: str, size: int, now: float) -> list[do.Action]:
        """The legacy of this session is here, whole."""
        inherit(self, session_id, size)
        return self._drain(now)

    # ---- in: from the shell --------------------------------------------------------------------------------

    def leased(self, round: int, now: float) -> list[do.Action]:
        """The leases of the round are in the ledger: its members may be told."""
        ex = self.exchange
        if self.phase is Phase.OPENING and ex is not None and ex.round == round:
            self.enter(Phase.OPEN)
            steps = self.settings.steps
            self.out.tell(events.RoundOpened(0.0, round, ex.step, steps, ex.names, ex.leased, True))
            for s in ex.members:
                if s in self.members.sessions:
                    self.announce(self.members.sessions[s], ex)
        return self._drain(now)

    def committed(self, done: do.CommitDone, now: float) -> list[do.Action]:
        """The round is durable; or, where no packet could be used, there was none."""
        ex = self.exchange
        if self.phase is Phase.CLOSED and ex is not None and ex.round == done.round:
            accepted = [s for s in ex.by_name if ex.members[s] in done.packets]
            self.leases.settle(ex.claims, accepted, self.members.sessions)
            proven = {name: why for name, why in done.rejected.items() if name not in done.denied}
            strike(self, proven, ex.keys, at_once=not accepted)
            shard_coordinator.judge(self, ex, done)
            if accepted:
                self._committed(ex, accepted, done, now)
            else:
                self._void(ex, now)
        return self._drain(now)

    def fingerprinted(self, round: int, truth: int, now: float) -> list[do.Action]:
        """What x' of the round hashes to in truth, after peers disagreed about it.

        A newcomer that differs never had the x' of this run, so it alone goes. One that had it and lost it is
        a fault of the method or the machine: the run stops rather than train two models.
        """
        ex = self.exchange
        if self.phase is Phase.CLOSED and ex is not None and ex.round == round:
            wrong = [s for s in ex.by_name if ex.reports[s].fingerprint != truth]
            had_it = [s for s in wrong if (session := self.members.get(s)) and session.accepted]
            if had_it:
                names = ", ".join(ex.members[s] for s in had_it)
                self.end(f"x' of round {round} at {names} is not what the ledger says", 1)
                return self._drain(now)
            for s in wrong:
                self.leases.refuse(s, ex.claims.pop(s), here=s in self.members.sessions)
                if s in self.members.sessions:
                    self.members.kick_other_state(self.members.sessions[s], round)
            if ex.claims:
                self.out.add(ex.commit(self.leases))
            else:
                self._void(ex, now)
        return self._drain(now)

    def failed(self, reason: str, exit_code: int, now: float) -> list[do.Action]:
        """Something the run cannot go on without failed: the disk, the aggregation."""
        self.end(reason, exit_code)
        return self._drain(now)

    def stop(self, reason: str, now: float, *, at_once: bool = False) -> list[do.Action]:
        """The owner ends the run, after the exchange in flight if not `at_once`."""
        self.end_by(reason, now, at_once=at_once)
        return self._drain(now)

    def end_by(self, reason: str, now: float, *, at_once: bool, pause: bool = False) -> None:
        if self.phase is not Phase.ENDED:
            self.reason, self.paused = reason, pause
            in_flight = self.phase in (Phase.OPEN, Phase.CLOSED)
            self._stop_at = now if at_once or not in_flight else now + self.settings.stop_s

    def tick(self, now: float) -> list[do.Action]:
        """Let time pass up to `now`."""
        self._ticked = now
        asleep = self.members.tick(now)
        self.admission.tick(now, asleep)
        self.waiting_since += asleep
        self.hold_until += asleep
        ex = self.exchange
        if ex is not None:
            ex.opened += asleep
            ex.deadline += asleep
            shard_coordinator.lose_the_silent(self, now)
            if self.phase is Phase.OPEN and now >= ex.deadline and not ex.claims:
                self._overdue(ex, "closes with the first update of", now)
        return self._drain(now)

    def deadline(self) -> float:
        """When to call `tick`, if nothing else happens before. inf: never."""
        times = [self.members.deadline(), self.admission.deadline()]
        if self._stop_at is not None and self.phase is not Phase.ENDED:
            times.append(self._stop_at)
        ex = self.exchange
        if self.phase is Phase.OPEN and ex is not None and (ex.claims or not ex.warned):
            times.append(min(ex.deadline, ex.look_at) if ex.news else ex.deadline)
        if self.phase in (Phase.WAITING, Phase.FINAL):
            times.append(self.waiting_since + self.settings.start_timeout)
            if self.round == 0 and self._ticked < self.started + self.settings.first_s:
                times.append(self.started + self.settings.first_s)
            if self.hold_until > self._ticked:
                times.append(self.hold_until)
            if not self.told_of_waiting and self.waiting_since + TELL_S > self._ticked:
                times.append(self.waiting_since + TELL_S)
        return min(times)

    def _session_ended(self, session: Session) -> int:
        self.evaluations.lost(session.id)
        self.pace.forget(session.id)
        self.speeds.forget(session.id)
        return self.leases.revoke(session.id)

    @property
    def ending(self) -> bool:
        return self.phase is Phase.ENDED or self._stop_at is not None

    def give_back(self, session: str, lease: int) -> None:
        self.leases.give_back(session, lease)
        self.out.add(do.GiveBack(session, lease))

    # ---- what peers say ------------------------------------------------------------------------------------

    def _report(self, session: Session, m: Report, now: float) -> None:
        ex = self.exchange
        if self.phase is Phase.OPEN and ex is not None and ex.round == m.round and session.id in ex.members:
            if session.id not in ex.claims and ex.is_cut_for_us(m):  # the newest counts
                ex.reports[session.id], session.fits = m, m.fits
            self.maybe_arrived(session, ex, now)
        elif m.round <= self.round:
            self.members.move(session, Kind.LATE)
            if not self.leases.held(session.id):
                session.owes = None
            if m.round in self.history.commits:
                self.out.send(session.conn, self.history.commits[m.round])
        else:
            self.members.ignored += 1

    def maybe_arrived(self, session: Session, ex: Exchange, now: float) -> None:
        """An update is a report and a packet, in any order; the packet in a part for each owner."""
        report = ex.reports.get(session.id)
        if report is None or session.id in ex.claims or not ex.whole(session.id):
            return
        ex.claims[session.id] = self.leases.claim(session.id, report.delivers)
        ex.arrived[session.id] = now - ex.opened
        if claims := ex.claims[session.id]:  # the times are of the newest
            self.speeds.note(
                session.id, count_samples(self.leases.ids(session.id, claims[-1]) or ()), report.compute_s
            )
        if void := sorted(set(report.delivers) - set(ex.claims[session.id])):
            self.out.warn(f"claims to deliver leases it does not hold: {void[:SHOWN]}", session.name)
        self.members.move(session, Kind.ARRIVED)

    # ---- rounds --------------------------------------------------------------------------------------------

    def _progress(self, now: float) -> None:
        """Whatever can happen now without anybody saying anything more."""
        if self.phase is Phase.ENDED:
            return
        idle = self.phase in (Phase.WAITING, Phase.FINAL)
        if self._stop_at is not None and (idle or now >= self._stop_at):
            self.end(self.reason, events.PAUSED if self.paused else 0)
        elif self.phase is Phase.WAITING:
            open_or_wait(self, now)
        elif self.phase is Phase.OPEN:
            self._close_or_wait(now)
        elif self.phase is Phase.FINAL:
            finish_or_wait(self, now)

    def announce(self, session: Session, ex: Exchange) -> None:
        samples = count_samples(self.leases.ids(session.id, ex.round) or ())
        message = ex.message(session.id, self.settings.steps, samples, self.evaluations.now)
        message = shard_coordinator.with_owners(self, ex, session, message)
        self.out.send(session.conn, message)

    def _close_or_wait(self, now: float) -> None:
        ex = self.exchange
        assert ex is not None
        sessions = self.members.sessions
        missing = [s for s in ex.members if s in sessions and sessions[s].state is State.TRAINING]
        found = len(ex.claims), len(missing)
        ex.news = found != ex.looked
        if missing and now < min(ex.look_at, ex.deadline):
            return
        ex.looked, ex.look_at, ex.news = found, now + LOOK_S, False
        waited = [s for s in missing if not self.members.suspect(sessions[s], now)]
        if ex.claims and waited:
            ex.deadline = ex.opened + self.pace.deadline(waited, ex.arrived)
        if not ex.claims and not missing:
            self._void(ex, now)
        elif ex.claims and (not waited or now >= ex.deadline):
            self._close(ex, missing, now)

    def _close(self, ex: Exchange, missing: list[str], now: float) -> None:
        self.enter(Phase.CLOSED)
        ex.estates = shard_coordinator.estates_of(self, ex.hubs)
        if missing:
            self._overdue(ex, "goes on without", now)
        for s in [s for s in ex.members if s in self.members.sessions]:
            self.pace.note(s, ex.arrived.get(s, now - ex.opened))
        self.members.move_all(ex.members.keys() - ex.spans.keys(), Kind.CLOSED)
        self.members.move_all(ex.spans, Kind.PARTED)
        if len({ex.reports[s].fingerprint for s in ex.claims}) > 1:
            self.out.add(do.FindFingerprint(ex.round))
        else:
            self.out.add(ex.commit(self.leases))

    def _overdue(self, ex: Exchange, what: str, now: float) -> None:
        """Once a round: it has waited long enough, and for whom."""
        if not ex.warned:
            missing = sorted((name, s) for s, name in ex.members.items() if s not in ex.claims)
            whom = ", ".join(f"{name} ({self.members.why(s, now)})" for name, s in missing)
            self.out.warn(f"round {ex.round} {what} {whom}, {now - ex.opened:.0f} s after it was opened")
        ex.warned = True

    def _committed(self, ex: Exchange, accepted: list[str], done: do.CommitDone, now: float) -> None:
        shard_coordinator.settle(self, ex, done)
        message = self.history.add(ex, accepted, done)
        for s in ex.members.keys() - set(accepted):
            if (session := self.members.get(s)) is not None:
                session.left_out += 1
        for s in accepted:
            if (session := self.members.get(s)) is not None:
                session.owes = now if session.state is State.APART else None
                session.accepted += 1
                session.tokens += done.tokens.get(session.name, 0)
                if (report := ex.reports[s]).tokens:  # else it repeats the times of the step before
                    session.compute_s += report.compute_s
                    session.wait_s += report.wait_s
                session.share = done.share(session.name)
                for lease in [r for r in self.leases.held(s) if r < ex.round - STALE]:
                    self.give_back(s, lease)
                    self.out.warn(f"did not deliver its lease of round {lease}", session.name)
        for session in list(self.members.sessions.values()):
            self.out.send(session.conn, message)
            if session.claims is not None and session.claims[0] <= ex.round:
                if self.history.differs(*session.claims):
                    self.members.kick_other_state(session, session.claims[0])
                session.claims = None
        self.round += 1
        moved = self.members.tell_traffic()
        told, steps = ex.told(accepted, done, now), self.settings.steps
        told = replace(told, step=self.step, steps=steps, counted=self.leases.counted)
        self.out.tell(told.with_bytes(moved))
        self._wait_again(now)

    def _void(self, ex: Exchange, now: float) -> None:
        """Nobody is left of this round, or no packet in it could be used: it is opened again."""
        self.leases.settle(ex.claims, (), self.members.sessions)
        self.evaluations.again()
        self._wait_again(now)

    def _wait_again(self, now: float) -> None:
        self.exchange = None
        self.enter(Phase.WAITING)
        self.waiting_since, self.told_of_waiting = now, False

    # ---- the end -------------------------------------------------------------------------------------------

    def end(self, reason: str, exit_code: int, *, finished: bool = False) -> None:
        if self.phase is Phase.ENDED:
            return
        self.finished, self.reason, self.resumable = finished, reason, exit_code != 0
        self.enter(Phase.ENDED)
        self.members.quiet = True
        for session in self.members.sessions.values():
            self.out.send(session.conn, Over(reason, finished, self.resumable))
        self.admission.dismiss(self.admission.asking, Refused("over", reason))
        self.out.tell(events.RunEnded(0.0, finished, reason, exit_code, self.round, self.leases.counted))
        self.out.add(do.End())

    # ---- small ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Whole global batches counted."""
        s = self.settings
        return s.steps if self.leases.done else self.leases.counted // s.global_batch

    def enter(self, phase: Phase) -> None:
        assert phase in PHASES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    def _drain(self, now: float) -> list[do.Action]:
        self._progress(now)
        return self.out.drain()
