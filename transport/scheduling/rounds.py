"""The rounds of a run, from the first to the final evaluation.

    WAITING -> OPENING   min_peers are ready: samples are leased and written to the ledger first
    OPENING -> OPEN      the members are told
    OPEN -> CLOSED       all expected updates are here, or the straggler deadline has passed and one is
    CLOSED -> WAITING    aggregated, durable, announced; the next round opens at once
    OPEN -> WAITING      no member is left, or no packet can be used: the round is opened again
    WAITING -> FINAL     every sample is counted
    FINAL -> ENDED       the result is evaluated

Methods put the actions that they cause into the outbox. Afterwards the hub calls `progress(now)`, which takes
every step that needs no further input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import asdict
from enum import Enum
from itertools import zip_longest

from msgspec import structs

from transport import actions as do
from transport.actions import Outbox
from transport.ledger import EvaluationRow, Recovered, RungRow
from transport.membership import Admission, Roster, Session, SessionEvent, State
from transport.protocol import (
    RunSettings,
    SampleRanges,
    count_samples,
    events,
    messages,
    ranges_of,
    sample_ids,
)

from .disputes import Disputes
from .exchange import Exchange, RoundHistory
from .figures import Evaluation, Evaluations, possible_report, why_impossible
from .hub_extension import HubExtension
from .leases import Ladder, Leases, LoadBalancer, need_of_round
from .straggler_deadline import StragglerDeadline

SHOWN = 8  # rounds, or names, in a warning
OWN_WORK = 2**40  # more updates than any run has
LATE = 64  # rounds after which nobody reads when a report of one comes
AWAY = 5  # times as long: the last samples of a peer that computes a lease of several rounds
SELDOM = 64  # rounds until a newcomer that has missed many is a member again
IN_FLIGHT = 2  # leases that a newcomer may hold: an update is delivered in the round after its lease's
NEWCOMERS_PART = 4  # of a batch's samples: at most so many newcomers are in a round that others are in
LOOK_S = 0.0003  # for each member: seconds between two computations of the deadline, which visit all of them
LONGEST_LOOK_S = 0.02
STALE = 4  # rounds after which a lease that a peer's accepted updates did not deliver is leased to others
TELL_S = 5.0  # seconds of waiting for min_peers before the host is told
LAST_BACK_S = 2.0  # seconds that a restarted hub gives the last peers once most of them are back
PACE = 32  # commits over which the rate is measured
DONE = "all steps are done"
LAST_SAMPLES = "others compute the last samples of the run, which it has and does not deliver"


class Phase(Enum):
    """Phases of a run."""

    WAITING = "waiting"  # fewer than min_peers are ready, or the holders of the last leases are not
    OPENING = "opening"  # leases are being written to the ledger
    OPEN = "open"  # members compute and upload
    CLOSED = "closed"  # being aggregated and made durable
    FINAL = "final"  # every sample is counted; the last evaluation
    ENDED = "ended"


# which phase may follow which; anything else is our bug
PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.OPENING, Phase.FINAL, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.OPEN, Phase.WAITING, Phase.ENDED}),
    Phase.OPEN: frozenset({Phase.CLOSED, Phase.WAITING, Phase.ENDED}),
    Phase.CLOSED: frozenset({Phase.WAITING, Phase.ENDED}),
    Phase.FINAL: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Rounds:
    """State of a run's rounds. `members.on_end` must call `session_ended`."""

    def __init__(
        self,
        settings: RunSettings,
        out: Outbox,
        members: Roster,
        admission: Admission,
        recovered: Recovered,
        now: float,
    ) -> None:
        self.settings, self._out, self._members, self._admission = settings, out, members, admission
        self.phase = Phase.WAITING
        self.round = recovered.round  # the next one to be committed
        self.exchange: Exchange | None = None
        self.busy = False  # the newest round has members that the run knows: who is unknown comes after them
        self.leases = Leases(settings.samples, recovered.counted)
        self.ladder, self.need = Ladder.of(settings.rungs), 0.0  # of the newest round whose lines are known
        for row in recovered.rungs:
            self.need = row.need or self.need
            self.ladder = self.ladder.committed(row.round, row.need, row.members)
        self.history = RoundHistory(recovered)
        self.disputes = Disputes({row.round: row.fingerprint for row in recovered.recent if row.fingerprint})
        self.evaluations = Evaluations(settings.eval, settings.eval_every, recovered.evaluation)
        self.extensions: list[HubExtension] = []
        self.over = messages.Over("", False)  # how the run ended
        self._durable: do.CommitDone | None = None  # a round that may not be announced yet
        self._deadline, self._balancer = StragglerDeadline(self._longest), LoadBalancer()
        self._opened_at: dict[int, float] = {}  # of the newest rounds
        self._started = now
        # (time, samples and tokens counted) at the last commits
        self._pace = deque[tuple[float, int, int]](maxlen=PACE)
        self._stop_at: float | None = None  # when a stop no longer waits for the exchange
        self._stop_reason, self._paused = "", False
        self._waiting_since = self._idle_since = self._ticked = self._hold_until = now
        self._told_of_waiting = False
        for old in recovered.sessions:
            self._hold_until = now + settings.recover_s
            trained = bool(old.leases) or any(old.name in row.members for row in recovered.recent)
            members.restore(old, now, awaited=trained)
            for lease_round, ids in old.leases.items():
                self.leases.grant(lease_round, {old.session: ids})
            self._deadline.recover(old.session, old.name, recovered.recent)

    # ---- messages of sessions ------------------------------------------------------------------------------

    def report(self, session: Session, m: messages.Report, now: float) -> None:
        m, wrong = possible_report(m, now - session.since + self.settings.lease_s)
        if wrong:
            self._out.warn(f"reports what cannot be: {', '.join(wrong)}", session.name)
        if m.round <= self.round:
            for one in self.extensions:
                one.heard(session, m, now)
        ex = self.open_to(session.id, m.round)
        if ex is not None:
            if session.id not in ex.claims:  # the newest counts
                ex.reports[session.id], session.fits = m, m.fits
            self.check_arrived(session, now)
        elif m.round <= self.round:
            self._members.move(session, SessionEvent.LATE)
            if (opened := self._opened_at.get(m.round)) is not None:
                self._deadline.came_late(session.id, now - opened)
            if not self.leases.held(session.id):
                session.owes_since = None
            if m.round in self.history.commits:
                self._out.send(session.conn, self.history.commits[m.round].to(session.name))
        else:
            self._members.ignored += 1

    def caught_up(self, session: Session, round: int) -> None:
        """Note the round whose x' a peer has."""
        session.at = max(session.at, round)
        for one in self.extensions:
            one.caught_up(session)

    def open_to(self, session: str, round: int) -> Exchange | None:
        """Return the exchange if this round is open with this session as a member."""
        ex = self.exchange
        is_open = self.phase is Phase.OPEN and ex is not None and ex.round == round
        return ex if is_open and ex is not None and session in ex.members else None

    def uploaded(self, session_id: str, round: int, now: float) -> None:
        """Note that the session's packet for `round` is here, whole."""
        session, ex = self._members.get(session_id), self.open_to(session_id, round)
        if session is not None and ex is not None:
            session.seen = now
            ex.uploads.add(session_id)
            self.check_arrived(session, now)

    def check_arrived(self, session: Session, now: float) -> None:
        """Claim leases once report and packet are here, in any order, and all that extensions wait for."""
        ex = self.exchange
        report = ex.reports.get(session.id) if ex is not None else None
        if ex is None or self.phase is not Phase.OPEN or report is None:
            return
        if session.id in ex.claims or session.id not in ex.uploads:
            return
        if not all(one.whole(session) for one in self.extensions):
            return
        claims = ex.claims[session.id] = self.leases.claim(session.id, report.delivers)
        ex.arrived[session.id] = now - ex.opened
        if claims:  # the reported time is that of the newest
            cost = self.cost_of(self.leases.claimed(session.id, claims[-1]))
            self._balancer.note(session.id, cost, report.compute_s)
        if self.extensions:
            mine = {lease: self.leases.claimed(session.id, lease) for lease in claims}
            for one in self.extensions:
                one.reported(session, report.extra.get(one.name, b""), mine)
        if void := sorted(set(report.delivers) - set(claims)):
            self._out.warn(f"claims to deliver leases it does not hold: {void[:SHOWN]}", session.name)
        self._members.move(session, SessionEvent.ARRIVED)

    def evaluated(self, session: Session, m: messages.Evaluated, now: float) -> None:
        """Take one part of an evaluation."""
        ev = self.evaluations.now
        if ev is None or ev.part_of(session.id) != m.part or ev.round != m.round:
            self._members.ignored += 1
            return
        if ev.final:
            session.owes_since = None
            self._members.move(session, SessionEvent.ARRIVED)
            self._members.move(session, SessionEvent.CLOSED)
        s = self.settings
        terms = m.tokens if s.eval_terms is None else s.eval_terms(m.part, ev.parts)
        if why := why_impossible((m.loss_sum, *m.figures), m.tokens, terms, s.bounds):
            self._out.warn(f"evaluates what cannot be: {why}", session.name)
            session.misjudged += 1
            self.evaluations.lost(session.id)
        else:
            ev.arrived(session.id, m, now)
            self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        """End the evaluation under way if it is whole. If two disagree, another evaluation decides."""
        ev = self.evaluations.now
        if ev is None:
            return
        if not ev.whole:
            if not ev.final and not ev.awaited:
                self.evaluations.again(disputed=True)
            return
        self.evaluations.finish()
        for session in self._members.present(ev.outliers()):
            session.misjudged += 1
            self._out.warn("its loss of the model on held-out data is not that of others", session.name)
        if not ev.tokens:  # a mean over nothing is no number
            return
        self.history.evaluated(ev.step, ev.loss)
        row = EvaluationRow(ev.round, ev.step, ev.loss, ev.tokens, ev.final, ev.figures)
        self._out.add(do.RecordEvaluation(row))
        self._out.tell(events.EvaluationDone(at=0.0, **asdict(row)))

    def _hurry_evaluation(self, now: float) -> None:
        """Go on without those who evaluate nothing for far longer than others took."""
        ev = self.evaluations.now
        if ev is None or now < ev.overdue_at(self._longest):
            return
        for session in self._members.present(ev.awaited):
            session.misjudged += 1
        ev.late.update(ev.awaited)
        if ev.final:  # others get their parts
            return
        ev.closed = self.evaluations.repeated
        if not ev.closed:
            self.evaluations.again()
        else:
            self._finish_evaluation()

    def _judges(self, sessions: Sequence[Session]) -> dict[str, str]:
        """Choose who evaluates: session -> key. Newcomers do where nobody else is here, and those whose
        results were not those of others."""
        for good in (
            [p for p in sessions if p.proven and not p.misjudged],
            [p for p in sessions if p.proven],
        ):
            if good:
                return {p.id: p.key for p in good}
        return {p.id: p.key for p in sessions}

    def _evaluation(self, step: int, now: float, *, final: bool) -> Evaluation:
        """Describe an evaluation of x' that begins now."""
        loss = self.history.eval_loss if self.history.eval_loss is not None else self.history.loss
        return Evaluation(self.round, step, 0, final, began=now, reference=loss)

    def session_ended(self, session: Session) -> None:
        """Forget a session; its undelivered samples are back in the pool."""
        self.evaluations.lost(session.id)
        self._finish_evaluation()
        self._deadline.forget(session.id)
        self._balancer.forget(session.id)
        self.disputes.gone(session.id)
        for one in self.extensions:
            one.session_ended(session)
        self.leases.revoke(session.id)

    def revoke_unheard(self, session: Session, holds: list[int]) -> None:
        """Return leases to the pool that a resumed peer never heard of, except that of the open round."""
        ex = self.exchange
        current = {ex.round} if ex is not None and session.id in ex.members else set()
        for lease in set(self.leases.held(session.id)) - set(holds) - current:
            self._give_back(session, lease)

    def lacks(self, session: Session, holds: list[int]) -> list[int]:
        """Return the leases that a peer holds of rounds to come, and this hub did not give: the hub that it
        has taken over from did, a moment before it was lost."""
        mine = self.leases.held(session.id)
        return [lease for lease in holds if lease >= self.round and lease not in mine]

    def repeat(self, session: Session, waiting: int) -> None:
        """Say again everything that a peer on a new connection may have missed; it waits for this commit."""
        ex = self.exchange
        if waiting in self.history.commits:
            self._out.send(session.conn, self.history.commits[waiting].to(session.name))
        if self.phase is Phase.OPEN and ex is not None and session.id in ex.members:
            self._announce(session, ex)
        elif self.phase is Phase.FINAL:
            self._announce_part(session)

    # ---- answers of the shell ------------------------------------------------------------------------------

    def leased(self, round: int) -> None:
        """Tell the members about the round: its leases are in the ledger."""
        ex = self.exchange
        if self.phase is Phase.OPENING and ex is not None and ex.round == round:
            self._enter(Phase.OPEN)
            steps = self.settings.steps
            self._out.tell(events.RoundOpened(0.0, round, ex.step, steps, ex.names, ex.leased, True))
            for session in self._members.present(ex.members):
                self._announce(session, ex)

    def committed(self, done: do.CommitDone, now: float) -> None:
        """Finish a durable round, as soon as it may be announced, or open it again where no packet could be
        used."""
        ex, self._durable = self.exchange, None
        if self.phase is not Phase.CLOSED or ex is None or ex.round != done.round:
            return
        if done.packets and not all(one.may_announce(done.round) for one in self.extensions):
            self._durable = done
            return
        accepted = [s for s in ex.by_name if ex.members[s] in done.packets]
        told = [event for one in self.extensions for event in one.committed(ex, done, now)]
        self.leases.settle(ex.claims, accepted, self._members)
        may = {name for name in done.rejected if all(one.may_strike(name) for one in self.extensions)}
        proven = {name: why for name, why in done.rejected.items() if name in may}
        self._strike(proven, ex.keys, at_once=not accepted)
        if accepted:
            self._finish_round(ex, accepted, done, now)
        else:
            self._void(ex, now)
        for event in told:
            self._out.tell(event)

    def fingerprinted(self, round: int, truth: int | None, why: str, now: float) -> None:
        """Settle a dispute about x' of a round by a replay of the ledger; `truth` is None where that failed.

        Who has said something else is dropped, the run goes on. It stops where the replay differs from what
        several members, or one of the host's own, agree on: that is a fault of the method or the machine.
        """
        verdict = self.disputes.replayed(truth, now)
        if truth is None:
            self._out.warn(
                f"the replay of the ledger to round {round} failed ({why}): nobody knows who is wrong"
            )
        elif self.phase is not Phase.ENDED:
            self._out.add(do.RecordFingerprint(round, truth))
        false = self._members.present(sorted(verdict.false))
        own = any(session.key == self.settings.own_key for session in false if session.key)
        if truth is not None and (own or verdict.differs_from_all):
            names = ", ".join(sorted(session.name for session in false)) or "those that have left"
            self.end(f"x' of round {round} at {names} is not what the ledger says", 1)
            return
        for session in false:
            self._out.warn("its x' is not the one that follows from the ledger: it is dropped", session.name)
            self._members.kick_other_state(session, round)

    # ---- time ----------------------------------------------------------------------------------------------

    def tick(self, now: float, asleep: float) -> None:
        """Let time pass. For `asleep` seconds of it the hub was suspended, which counts against no peer."""
        self._ticked = now
        self._waiting_since += asleep
        self._idle_since += asleep
        self._hold_until += asleep
        ex = self.exchange
        if ex is not None:
            ex.opened += asleep
            ex.deadline += asleep
            overdue = self.phase is Phase.OPEN and not ex.claims and now >= ex.opened + self._longest
            if overdue and now >= ex.deadline:
                self._warn_overdue(ex, "closes with the first update of", now)
        for one in self.extensions:
            one.tick(now)

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        times = [self.disputes.deadline(), *(one.deadline() for one in self.extensions)]
        if self._stop_at is not None and self.phase is not Phase.ENDED:
            times.append(self._stop_at)
        ex, ev = self.exchange, self.evaluations.now
        if ev is not None and (at := ev.overdue_at(self._longest)) > self._ticked:
            times.append(at)
        if self.phase is Phase.OPEN and ex is not None and (ex.claims or not ex.warned):
            times.append(min(ex.deadline, ex.look_at) if ex.news else ex.deadline)
        if self.phase in (Phase.WAITING, Phase.FINAL):
            times.append(self._waiting_since + self.settings.start_timeout)
            if self.round == 0 and self._ticked < self._started + self.settings.first_wait_s:
                times.append(self._started + self.settings.first_wait_s)
            if self._hold_until > self._ticked:
                times.append(self._hold_until)
            if not self._told_of_waiting and self._waiting_since + TELL_S > self._ticked:
                times.append(self._waiting_since + TELL_S)
            if not self.leases.free:  # the last samples are taken back then
                ten = self._deadline.ten_rounds
                times += [at for many in (1, AWAY) if (at := self._idle_since + many * ten) > self._ticked]
        return min(times)

    def progress(self, now: float) -> None:
        """Take every step that needs no further input."""
        if self.phase is Phase.ENDED:
            return
        if (disputed := self.disputes.next_replay(now)) is not None:
            self._out.add(do.FindFingerprint(disputed))
        if self._durable is not None:
            self.committed(self._durable, now)
        idle = self.phase in (Phase.WAITING, Phase.FINAL)
        if self._stop_at is not None and (idle or now >= self._stop_at):
            self.end(self._stop_reason, events.PAUSED if self._paused else 0)
        elif self.phase is Phase.WAITING:
            self._open_or_wait(now)
        elif self.phase is Phase.OPEN:
            self._hurry_evaluation(now)
            self._close_or_wait(now)
        elif self.phase is Phase.FINAL:
            self._finish_or_wait(now)

    # ---- opening -------------------------------------------------------------------------------------------

    def _open_or_wait(self, now: float) -> None:
        s, waits, held = self.settings, self.disputes.waits, self.leases.held
        ready = [
            p for p in self._members.ready() if not waits(p.id) and (held(p.id) or not self._no_lease(p))
        ]
        if self.leases.done:
            self.evaluations.finish()  # one of an older x' is void: the final one counts now
            self._enter(Phase.FINAL)
            self._waiting_since = now
            self._finish_or_wait(now)
        elif self._others_expected(len(ready), now):
            if s.guests:
                self._tell_missing(s.first_peers - len(ready), now)
        elif not ready or len(ready) + self._members.apart < s.min_peers:
            self._tell_missing(max(1, s.min_peers) - len(ready), now)
            if now >= self._waiting_since + s.start_timeout:
                why = f"{len(ready)} peers were ready, {s.min_peers} needed, for {s.start_timeout:.0f} s"
                self.end(": ".join(filter(None, (why, self._not_ready(now)))), 7)
        else:
            self._waiting_since = now
            if not self.leases.free:
                self._take_back_last(now)
                ready = self._members.present([p.id for p in ready])
            if members := self._chosen(ready):
                self._open(members, now)
            # else the holders of the last samples are behind: they deliver, or lose them

    def _no_lease(self, session: Session) -> str:
        return next((why for one in self.extensions if (why := one.no_lease(session, self.round))), "")

    def _chosen(self, ready: list[Session]) -> list[Session]:
        """Choose the members of a round, by name; none where nothing is left that they could do. Beside those
        that the run knows these are a few newcomers, in turn, and none that is to wait as it has delivered
        nothing."""
        new = [p for p in ready if not p.proven and p.waits_until <= self.round]
        # Each newcomer gets a sample, and costs what an update costs, whether it delivers or not.
        most = max(1, self.settings.global_batch * self.ladder.steps // NEWCOMERS_PART)
        able, few = self._with(new, ready), most if any(p.proven for p in ready) else len(ready)
        holding = {p.id for p in able if self.leases.held(p.id)}
        for one in self.extensions if self.leases.free or holding else ():
            if (members := one.choose(self.round, able, holding, few)) is not None:
                return members
        chosen = self._with(in_turn(new, self.round * most)[:most], ready)
        return chosen if self.leases.free or any(self.leases.held(p.id) for p in chosen) else []

    def _with(self, new: Sequence[Session], ready: list[Session]) -> list[Session]:
        """Return those that are ready without other newcomers than these, unless they are too few then."""
        chosen = {p.id for p in new}
        able = [p for p in ready if p.proven or p.id in chosen]
        enough = len(able) + self._members.apart >= self.settings.min_peers
        return able if enough and any(p.proven for p in able) else ready

    def _take_back_last(self, now: float) -> None:
        """End the sessions of those that do not deliver the last samples, so that others can: of newcomers
        that have missed a round, of others that have missed some, or are gone for as long as ten rounds
        take."""
        gone = {State.BEHIND: 1, State.APART: AWAY}
        for session in self._members:
            patience = self._deadline.ten_rounds * gone.get(session.state, 0)
            late = patience and now >= self._idle_since + patience
            if self.leases.held(session.id) and (late or session.missed >= (STALE if session.proven else 1)):
                self._members.kick(session, "session", LAST_SAMPLES)

    def _open(self, ready: list[Session], now: float) -> None:
        s, free = self.settings, self.leases.free
        if s.guests and self.round == 0 and len(ready) < s.first_peers:
            waited = f"{s.first_wait_s / 60:.0f} min"
            self._out.warn(
                f"the first step waits no longer for {s.first_peers - len(ready)} of its peers ({waited})"
            )
        step = (s.samples - free) // s.global_batch if free else s.steps
        granted, spans = self._grant(ready)
        self.busy = any(p.proven for p in ready)
        here = [p for p in ready if p.id not in spans]  # members of the rounds after this one, too
        # All but a quarter of them can fetch what fits: no single one of many decides.
        sizes = sorted(p.fits for p in here if p.fits and (p.proven or not self.busy))
        ex = self.exchange = Exchange(
            round=self.round,
            step=step,
            members={p.id: p.name for p in ready},
            leased=sum(count_samples(ids) for ids in granted.values()),
            opened=now,
            deadline=now + self._longest,
            keys={p.name: p.key for p in ready},
            spans=spans,
            fits=sizes[len(sizes) // 4] if sizes else 0,
            rung=self.ladder.at,
            local_steps=self.ladder.steps,
        )
        self._deadline.cap = self._longest
        recent = {r: at for r, at in self._opened_at.items() if r > self.round - LATE}
        self._opened_at = recent | {self.round: now}
        for p in ready:
            self._members.move(p, SessionEvent.OPENED)
            p.owes_since = now if p.owes_since is None else p.owes_since
        if self.evaluations.due(step):
            self.evaluations.begin(self._evaluation(step, now, final=False), self._judges(here))
        for one in self.extensions:
            one.opens(ex, granted)
        self._enter(Phase.OPENING)
        new = self._members.to_record(granted)
        self._out.add(do.Lease(self.round, granted, ex.fits, ex.rung, new))

    def _grant(self, ready: list[Session]) -> tuple[dict[str, SampleRanges], dict[str, int]]:
        """Lease a global batch a local step. Returns samples by session, and rounds of longer leases."""
        s, round, free = self.settings, self.round, self.leases.free
        granted = self.leases.of(round, [p.id for p in ready])
        out = {p.id for p in ready if self._no_lease(p)}
        held = {p.id for p in ready if not p.proven and len(self.leases.held(p.id)) >= IN_FLIGHT}
        takers = [p.id for p in ready if p.id not in held | granted.keys() | out]
        if not takers:
            return granted, {}
        wanted = s.global_batch * self.ladder.steps
        batch = min(max(0, wanted - sum(map(count_samples, granted.values()))), free)
        longest = min(s.longest_lease, free // max(1, wanted))
        ids = self.leases.next(batch)
        costs = [1.0] * len(ids) if s.cost is None else [s.cost(i) for i in ids]
        portions = self._balancer.portions(costs, takers, round, longest)
        taken = {p: one for p, one in zip(takers, portions, strict=True) if one.samples}
        new = {p: ranges_of(ids[place] for place in one.samples) for p, one in taken.items()}
        self.leases.grant(round, new)
        return granted | new, {p: one.spans for p, one in taken.items() if one.spans > 1}

    def cost_of(self, ids: SampleRanges) -> float:
        """Return the cost of samples, as shares of a batch count it."""
        cost = self.settings.cost
        return count_samples(ids) if cost is None else sum(map(cost, sample_ids(ids)))

    def _others_expected(self, ready: int, now: float) -> bool:
        """Tell whether to wait a little: for peers from before a restart, for those that start with the run,
        and for addresses that are being dialled, so that the first round knows who can be reached."""
        s, dialled = self.settings, self._members.dialling
        first = ready < s.first_peers or dialled
        starting = self.round == 0 and first and now < self._started + s.first_wait_s
        awaited = self._members.awaited
        if awaited < ready:  # most are back: one that died with the hub must not hold up the run
            self._hold_until = min(self._hold_until, now + LAST_BACK_S)
        return starting or (bool(dialled or awaited) and now < self._hold_until)

    def _tell_missing(self, lacking: int, now: float) -> None:
        """Tell the host, once a round, how many peers are missing, and what the hub knows of them."""
        if self._told_of_waiting or now < self._waiting_since + TELL_S:
            return
        self._told_of_waiting = True
        known = self._not_ready(now) or "none has come yet"
        self._out.warn(f"waiting for {lacking} {'peer' if lacking == 1 else 'peers'}: {known}")

    def _not_ready(self, now: float) -> str:
        refused = [f"{p.name} ({why})" for p in self._members.ready() if (why := self._no_lease(p))]
        return ", ".join(self._members.not_ready(now) + refused)

    def call(self, session: Session, round: int) -> None:
        """Tell a peer that is no member to catch up, and to say that it is ready."""
        call = messages.Round(round, self.step, self.settings.steps, [], 0, False)
        self._out.send(session.conn, call)

    def _announce(self, session: Session, ex: Exchange) -> None:
        samples = count_samples(self.leases.ids(session.id, ex.round) or ())
        message = ex.message(session, self.settings.steps, samples, self.evaluations.now)
        if extra := {one.name: body for one in self.extensions if (body := one.announce(ex, session))}:
            message = structs.replace(message, extra=extra)
        self._out.send(session.conn, message)

    # ---- closing -------------------------------------------------------------------------------------------

    def _close_or_wait(self, now: float) -> None:
        ex = self.exchange
        assert ex is not None
        missing = [p for p in self._members.present(ex.members) if p.state is State.TRAINING]
        counted = len(ex.claims), len(missing)
        ex.news = counted != ex.counted
        if missing and now < min(ex.look_at, ex.deadline):
            return
        look = min(LONGEST_LOOK_S, LOOK_S * len(ex.members))
        ex.counted, ex.look_at, ex.news = counted, now + look, False
        waited = [p.id for p in missing if not self._members.suspect(p, now)]
        trusted = self._deadline.trusted
        # a round without updates, of newcomers alone, keeps trusted peers waiting
        in_vain = not ex.claims and not any(p.id in trusted for p in missing)
        in_vain = in_vain and any(p.id in trusted for p in self._members.ready())
        if ex.claims and waited:
            ex.deadline = ex.opened + self._deadline.after_opening(waited, ex.arrived)
        elif in_vain:
            patience = self._deadline.patience(waited)
            ex.deadline = ex.opened + (self._longest if patience is None else patience)
        # Of missing members a quorum waits for those that are trusted, if there are any at all.
        awaited = sum(p.id in trusted for p in missing) if trusted else len(missing)
        lacks = not all(one.may_close(len(ex.claims), awaited) for one in self.extensions)
        if lacks:  # until they come, or are dropped
            ex.deadline = ex.opened + self._longest
        if ex.claims and not lacks and any(one.enough(ex) for one in self.extensions):
            self._close(ex, [], now)
        elif not ex.claims and (not missing or (now >= ex.deadline and in_vain)):
            self._void(ex, now)
        elif ex.claims and ((not waited and not lacks) or now >= ex.deadline):
            self._close(ex, [p.id for p in missing], now)

    def _close(self, ex: Exchange, missing: list[str], now: float) -> None:
        self._enter(Phase.CLOSED)
        ex.closed = now - ex.opened
        for one in self.extensions:
            one.closes(ex)
        if missing:
            self._warn_overdue(ex, "goes on without", now)
        members = self._members.present(ex.members)
        here = {p.id: ex.arrived[p.id] for p in members if p.id in ex.arrived}
        self._deadline.closed(ex.closed, missing, here, {p.id for p in members if p.proven})
        self._note_missing(ex, missing)
        for session in members:
            event = SessionEvent.PARTED if session.id in ex.spans else SessionEvent.CLOSED
            self._members.move(session, event)
        self._commit(ex)

    def _note_missing(self, ex: Exchange, missing: Container[str]) -> None:
        """Let a newcomer that misses rounds be a member ever more seldom, until it has delivered."""
        for session in self._members.present(ex.members):
            session.missed = session.missed + 1 if session.id in missing else 0
            if session.missed and not session.proven:
                session.waits_until = ex.round + min(2**session.missed, SELDOM)

    def _commit(self, ex: Exchange) -> None:
        """Commit what agrees about x', and leave out those who have to wait for a replay of the ledger."""
        own = self.settings.own_key  # the host's own machine comes before all others
        work = {p.id: p.accepted + (OWN_WORK if own and p.key == own else 0) for p in self._members}
        reports = ex.fingerprints(ex.claims)
        wait = set[str]()
        for round, said in reports.items():
            wait |= self.disputes.reported(round, said, {s: work.get(s, 0) for s in said})
        for s in wait:
            self.leases.refuse(s, ex.claims.pop(s), here=s in self._members)
        agreed = {}
        for round, said in reports.items():
            here = [s for s in said if s in ex.claims]  # they say the same
            if here:
                self.disputes.agree(round, said[here[0]], len({ex.keys[ex.members[s]] for s in here}))
                if self.disputes.known(round) is not None:
                    agreed[round] = said[here[0]]
        refused = {name: why for one in self.extensions for name, why in one.refusals(ex).items()}
        claims = ex.claimed(self.leases)
        if len(self.settings.rungs) > 1:
            samples = ((c.session, sum(map(count_samples, c.leases.values()))) for c in claims)
            need = need_of_round((ex.reports[session].needs, many) for session, many in samples)
            ex.noted = RungRow(ex.round, ex.rung, need, len(ex.members))
        self._out.add(
            do.Commit(
                round=ex.round,
                step=ex.step,
                members=ex.names,
                claims=claims,
                fingerprints=agreed,
                last_loss=self.history.loss,
                rung=ex.noted,
                refused=refused,
            )
        )

    def _warn_overdue(self, ex: Exchange, what: str, now: float) -> None:
        """Tell the host, once a round, that the deadline has passed and which members are missing."""
        if not ex.warned:
            missing = sorted((name, s) for s, name in ex.members.items() if s not in ex.claims)
            told = [(name, s) for name, s in missing if self._out.repetitions.count(name, what)][:SHOWN]
            names = [f"{name} ({self._members.why(s, now)})" for name, s in told]
            if rest := len(missing) - len(told):
                names.append(f"{rest} {'other' if rest == 1 else 'others'}")
            if told:
                took = f"{now - ex.opened:.0f} s after it was opened"
                self._out.tell(events.Warned(0.0, f"round {ex.round} {what} {', '.join(names)}, {took}"))
        ex.warned = True

    # ---- committing ----------------------------------------------------------------------------------------

    def _strike(self, rejected: dict[str, str], keys: dict[str, str], *, at_once: bool) -> None:
        """Count unusable packets against their senders, who go `at_once` if the round had no other packet."""
        for name, reason in sorted(rejected.items()):
            self._out.warn(f"its packet cannot be used: {reason}", name)
            banned = self._admission.strike(keys[name], name, reason)
            if banned:
                self.forget_key(keys[name])
            why = (
                self._admission.known[keys[name]].reason if banned else f"its packet cannot be used: {reason}"
            )
            for session in self._members.with_key(keys[name]):
                if banned or (at_once and session.name == name):
                    self._members.kick(session, "kicked", why)

    def moves(self, session: str) -> None:
        """Have extensions note that bytes of objects move between the hub and a session."""
        for one in self.extensions:
            one.moves(session)

    def wrote(self, rounds: int) -> None:
        """Have extensions note that the ledger has changed, and has so many rounds."""
        for one in self.extensions:
            one.wrote(rounds)

    def forget_key(self, key: str) -> None:
        """Have extensions forget the evidence on a key."""
        for one in self.extensions:
            one.forget_key(key)

    def _finish_round(self, ex: Exchange, accepted: list[str], done: do.CommitDone, now: float) -> None:
        commit = self.history.add(ex, accepted, done)
        for session in self._members.present(ex.members):
            if session.id in accepted:
                self._credit(session, ex, done, now)
            else:
                session.left_out += 1
        for session in self._members:
            message, extra = commit.to(session.name), done.extra.get(session.id, {})
            waited = max(0.0, ex.closed - ex.arrived.get(session.id, ex.closed))  # its update, for others
            own = structs.replace(message, extra=extra, waited=waited) if extra or waited else message
            self._out.send(session.conn, own)
            if session.ready_claim is not None and session.ready_claim[0] <= ex.round:
                self.disputes.claims(session.id, *session.ready_claim)
                session.ready_claim = None
        self.round += 1
        if ex.noted is not None:
            self.ladder = self.ladder.committed(ex.round, ex.noted.need, ex.noted.members)
            self.need = ex.noted.need or self.need
        for name, why in sorted(done.impossible.items()):
            self._out.warn(f"reports what cannot be: {why}", name)
        reports = {ex.members[s]: ex.reports[s] for s in accepted}
        norms = {name: r.grad_norm for name, r in reports.items() if r.grad_norm > 0}
        moved, counted = self._members.tell_traffic(), self.leases.counted
        self._pace.append((now, counted, self.history.tokens))
        self._out.tell(
            events.RoundCommitted(
                at=0.0,
                round=ex.round,
                step=self.step,
                steps=self.settings.steps,
                counted=counted,
                loss=done.loss,
                tokens=sum(done.tokens.values()),
                members=ex.names,
                accepted=tuple(reports),
                fingerprint=self.disputes.known(ex.round) or 0,
                size=done.size,
                packets=done.packets,
                tokens_by_peer=done.tokens,
                compute_s={name: r.compute_s for name, r in reports.items()},
                wait_s={name: r.wait_s for name, r in reports.items()},
                seconds=now - ex.opened,
                up={peer: m.up for peer, m in moved.items()},
                down={peer: m.down for peer, m in moved.items()},
                fetched={peer: m.fetched for peer, m in moved.items() if m.fetched},
                grad_norm=norms,
                norm=self.history.grad_norm if norms else None,
                figures=done.figures,
                eta_s=self.eta_s(now),
                deadline=ex.deadline - ex.opened,
                local_steps=ex.local_steps,
                rung=self.settings.rungs[ex.rung].words,
                need=ex.noted.need if ex.noted is not None else 0.0,
                extra={key: of for one in self.extensions for key, of in one.round_fields().items()},
            )
        )
        self._wait_again(now)

    def _credit(self, session: Session, ex: Exchange, done: do.CommitDone, now: float) -> None:
        """Book a member's accepted packet; revoke leases that it should have delivered long ago."""
        session.owes_since = now if session.state is State.APART else None
        session.accepted += 1
        session.proven = True
        self._admission.remember(session.key)
        session.tokens += done.tokens.get(session.name, 0)
        if (report := ex.reports[session.id]).tokens:  # else it repeats the times of the step before
            session.compute_s += report.compute_s
            session.wait_s += report.wait_s
        total = sum(done.weights.values())
        session.share = done.weights[session.name] / total if total else 1 / len(done.weights)
        for lease in [r for r in self.leases.held(session.id) if r < ex.round - STALE]:
            self._give_back(session, lease)
            self._out.warn(f"did not deliver its lease of round {lease}", session.name)

    def _give_back(self, session: Session, lease: int) -> None:
        self.leases.give_back(session.id, lease)
        self._out.add(do.GiveBack(session.id, lease))

    def _void(self, ex: Exchange, now: float) -> None:
        """Open the round again: none of its members is left, or delivers, or none of its packets could be
        used."""
        self.leases.settle(ex.claims, (), self._members)
        missing = {p.id for p in self._members.present(ex.members) if p.state is State.TRAINING}
        self._note_missing(ex, missing)
        for session in self._members.present(missing):
            self._members.move(session, SessionEvent.CLOSED)
        self.evaluations.again()
        self._wait_again(now)

    def _wait_again(self, now: float) -> None:
        self.exchange = None
        self._enter(Phase.WAITING)
        self._waiting_since = self._idle_since = now
        self._told_of_waiting = False

    # ---- the end -------------------------------------------------------------------------------------------

    def _finish_or_wait(self, now: float) -> None:
        """Have peers compute each part of the final evaluation, then end."""
        if self.evaluations.finished or not self.evaluations.wanted:
            self.end(DONE, 0, finished=True)
            return
        ready = self._members.ready()
        able = [p for p in ready if all(one.may_evaluate(p, self.round) for one in self.extensions)]
        ready = able or ready
        self._hurry_evaluation(now)
        fresh = self._evaluation(self.settings.steps, now, final=True)
        given = self.evaluations.assign(fresh, self._judges(ready))
        for session in self._members.present(given):
            session.owes_since = now
            self._members.move(session, SessionEvent.OPENED)
            self._announce_part(session)
        ev = self.evaluations.now
        if ev is not None and not given and not ev.awaited:  # nobody else is here to decide
            ev.closed = True
            self._finish_evaluation()
            if self.evaluations.finished:
                self.end(DONE, 0, finished=True)
                return
        if ready or (ev is not None and ev.awaited):
            self._waiting_since = now
        elif now >= self._waiting_since + self.settings.start_timeout:
            self._out.warn("the final evaluation was not completed: no peer is left")
            self.end(DONE, 0, finished=True)

    def _announce_part(self, session: Session) -> None:
        """Tell a peer (again) which part of the final evaluation to compute."""
        ev = self.evaluations.now
        part = ev.part_of(session.id) if ev is not None and ev.final else None
        if ev is not None and part is not None:
            names = sorted(p.name for p in self._members.present(ev.awaited))[: messages.NAMED]
            self._out.send(
                session.conn, messages.Round(ev.round, ev.step, ev.step, names, 0, False, part, ev.parts)
            )

    def stop(self, reason: str, now: float, *, at_once: bool = False, pause: bool = False) -> None:
        """End the run by the host's wish, after the exchange in flight unless `at_once`."""
        if self.phase is not Phase.ENDED:
            self._stop_reason, self._paused = reason, pause
            in_flight = self.phase in (Phase.OPEN, Phase.CLOSED)
            self._stop_at = now if at_once or not in_flight else now + self.settings.stop_s

    def end(self, reason: str, exit_code: int, *, finished: bool = False) -> None:
        """End the run at once."""
        if self.phase is Phase.ENDED:
            return
        self.over = messages.Over(reason, finished, exit_code != 0)
        self._enter(Phase.ENDED)
        self._members.quiet = True
        for session in self._members:
            self._out.send(session.conn, self.over)
        self._out.tell(events.RunEnded(0.0, finished, reason, exit_code, self.round, self.leases.counted))
        self._out.add(do.End())
        for one in self.extensions:
            one.ended()

    @property
    def ending(self) -> bool:
        return self.phase is Phase.ENDED or self._stop_at is not None

    # ---- figures -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Count whole global batches in x'."""
        s = self.settings
        return s.steps if self.leases.done else self.leases.counted // s.global_batch

    @property
    def state_word(self) -> str:
        """Name the run's state as `cocktail status` does."""
        if self.phase is Phase.ENDED:
            if self.over.finished:
                return "finished"
            return "paused" if self._paused else "failed" if self.over.resumable else "stopped"
        return "waiting" if self.phase is Phase.WAITING else "running"

    @property
    def _longest(self) -> float:
        """Return the seconds that a round waits at most."""
        return self.settings.step_timeout * self.ladder.steps

    def elapsed(self, now: float) -> float:
        """Return the seconds since this hub started."""
        return max(1e-9, now - self._started)

    def rates(self, now: float) -> tuple[float, float]:
        """Return the samples and tokens a second of the last commits; 0 before there are two of them."""
        if len(self._pace) < 2:
            return 0.0, 0.0
        (began, samples, tokens), (ended, *last) = self._pace[0], self._pace[-1]
        mean = (ended - began) / (len(self._pace) - 1)
        # a round that takes longer than the mean counts
        span = max(ended - began, now - mean - began, 1e-9)
        return max(1, last[0] - samples) / span, (last[1] - tokens) / span

    def eta_s(self, now: float) -> float | None:
        """Estimate the seconds to the end at the rate of the last commits; None: it is not known."""
        rate, _ = self.rates(now)
        return (self.settings.samples - self._pace[-1][1]) / rate if rate else None

    def _enter(self, phase: Phase) -> None:
        assert phase in PHASES[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase


def in_turn(sessions: Sequence[Session], turn: int) -> list[Session]:
    """Order sessions so that origins take turns, and at each origin who has missed least comes first."""
    lines: dict[str, list[Session]] = {}
    for session in sorted(sessions, key=lambda p: p.missed):
        lines.setdefault(session.origin, []).append(session)
    order = [*lines.values()]
    first = turn % max(1, len(order))
    ranks = zip_longest(*order[first:], *order[:first])
    return [session for rank in ranks for session in rank if session is not None]
