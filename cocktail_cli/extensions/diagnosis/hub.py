"""The hub's diagnosis: follows each round, names who has made it longer, and which line bounds the last ones.

opens      members that evaluate take longer
heard      when a report came, before its packet; a late one says what has kept its peer
reported   the samples of the newest lease that an update delivers
counted    how long the hub took for the sum and its disk
committed  the round as a sample: votes on each member, and on the hub
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from transport.actions import CommitDone
from transport.hub import HubParts
from transport.ledger import Counted
from transport.membership import Session, State
from transport.protocol import Event, SampleRanges, count_samples, events, messages
from transport.scheduling import CommitSeconds, Exchange, HubExtension, Lines

from .bodies import NAME, Culprit, SlowestLine, spent_of
from .slow_rounds import Moving, PeerSample, RoundSample, Sight, SlowRounds
from .slowest_line import LineWatch

UNTIMED, UNREPORTED = CommitSeconds(0.0, 0.0), messages.Report(0, 0, [])


class Diagnostician(HubExtension):
    """Diagnoses the rounds of one hub."""

    name = NAME

    def __init__(self, hub: HubParts) -> None:
        self._out, self._members, self._rounds = hub.out, hub.members, hub.rounds
        self._lines: Lines | None = None  # None: there are no sockets
        self.slow, self._watch = SlowRounds(), LineWatch()
        self.slowest: SlowestLine | None = None  # what bounds the last rounds
        self._uneven_until = -1  # rounds in which members evaluate, and those after them, take longer
        # of the open round, by session
        self._reported: dict[str, float] = {}  # seconds after the opening, of the first report
        self._delivered: dict[str, tuple[int, float]] = {}  # samples and their cost, of the newest lease
        self._took: dict[int, CommitSeconds] = {}  # by round, until it is announced

    def watch(self, lines: Lines) -> None:
        self._lines = lines

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        self._reported, self._delivered = {}, {}
        evaluation = self._rounds.evaluations.now
        if evaluation is not None and evaluation.round == ex.round:
            self._uneven_until = ex.round + 1

    def heard(self, session: Session, report: messages.Report, now: float) -> None:
        ex = self._rounds.open_to(session.id, report.round)
        if ex is not None:
            if session.id not in ex.claims:
                self._reported.setdefault(session.id, now - ex.opened)
            return
        lease = self._rounds.leases.ids(session.id, max(report.delivers, default=-1)) or ()
        sample = PeerSample(
            session.name, now, report.compute_s, report.wait_s, *self._size(lease), spent=spent_of(report)
        )
        for event in told(self.slow.late(session.id, sample)):
            self._out.tell(event)

    def reported(self, session: Session, body: bytes, claims: Mapping[int, SampleRanges]) -> None:
        if claims:  # the reported time is that of the newest
            self._delivered[session.id] = self._size([*claims.values()][-1])

    def counted(self, round: int, counted: Sequence[Counted], took: CommitSeconds) -> Mapping[str, bytes]:
        self._took[round] = took
        return {}

    def committed(self, ex: Exchange, done: CommitDone, now: float) -> Sequence[Event]:
        if not done.packets:
            return ()
        sample = self._sample(ex, done, now)
        self.slowest = self._watch.add(sample)
        return told(self.slow.add(sample))

    def round_fields(self) -> Mapping[str, Any]:
        return {"bottleneck": self.slowest.line if self.slowest is not None else ""}

    def session_ended(self, session: Session) -> None:
        self.slow.forget(session.id)

    def status(self) -> Mapping[str, Any]:
        return {"bottleneck": to_builtins(self.slowest), "culprits": to_builtins(self.slow.culprits)}

    def _size(self, lease: SampleRanges) -> tuple[int, float]:
        """Return the number of samples of a lease, and their cost."""
        return count_samples(lease), self._rounds.cost_of(lease)

    def _sample(self, ex: Exchange, done: CommitDone, now: float) -> RoundSample:
        """Describe a durable round."""
        before = self._rounds.history.commits.get(ex.round - 1)
        peers = {}
        for session, name in ex.members.items():
            report, at = ex.reports.get(session, UNREPORTED), ex.arrived.get(session, ex.closed)
            samples, cost = self._delivered.get(session, (0, 0.0))
            peers[session] = PeerSample(
                name,
                ex.opened + at,
                compute_s=report.compute_s,
                wait_s=report.wait_s,
                samples=samples,
                cost=cost,
                upload_s=at - self._reported.get(session, at),
                up=done.packets.get(name, 0),
                down=before.message.size if before is not None else 0,
                spent=spent_of(report),
                whole=session in ex.arrived,
            )
        took = self._took.pop(ex.round, UNTIMED)
        return RoundSample(
            ex.round,
            ex.opened,
            peers,
            sights={s.id: self._sight(s, ex.round, now) for s in self._members if s.state is State.BEHIND},
            aggregate_s=took.sum,
            disk_s=took.disk,
            uneven=ex.round <= self._uneven_until,
        )

    def _sight(self, session: Session, round: int, now: float) -> Sight:
        """See a peer that this round has closed without."""
        if self._lines is None:
            return Sight(now - session.seen)
        there = self._lines.under_way(session.id, round, now)
        update = None if there is None else Moving(*there)
        return Sight.of(self._lines.crossed(session.id), session.seen, update, now)


def told(found: Iterable[Culprit]) -> list[Event]:
    """Return the events that name culprits."""
    return [events.OfExtension(0.0, one) for one in found]
