"""Names the peer that lengthens rounds, with its cause. No clock, no I/O.

    own       seconds of a peer's cycle, from one arrival of an update to the next, less its idle time
    without   the longest own time of the peers that are not far above the others: what the round would take
    slow      own >= (1 + EFFECT) x without
    cause     the phase of its round that explains the difference by its growth over what is usual for this
              peer and this size, beyond its spread; or a counter of its machine that has grown with it
    named     slow with the same cause in VOTES of its last WINDOW rounds

- A slow, steady peer whose share of the batch the load balancer has adapted has an own time as all others.
- Evidence that noise cannot make counts at once: a process that did not run, a machine that slept, a phase
  that has grown by DRASTIC rounds.
- Rounds in which a peer was slow with a cause do not enter its history: a lasting fault stays one.
- A peer that was slow from the beginning has no better history. It is compared with the others, and named
  where nearly all of its rounds are CHRONIC times as long as they would be without it.
- A round that leaves a peer out was lengthened by it up to the straggler deadline. It is named by what the
  hub sees of it (`Sight`) meanwhile, if that is beyond doubt, or by its next report; after SILENT_S as
  silent.
- From outside a process without memory looks as a stopped one. What a silent peer is named for is withdrawn
  once it says itself what has kept it.
- Many TCP segments sent again are the line's loss, not its noise: one slow round with them suffices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from .causes import Cause, Culprit, evidence_of, resent_by, seconds
from .round_sample import PeerSample, RoundSample, Usual, usual
from .sight import Sight
from .spent import Spent

HUB = "the hub"
EFFECT = 0.2  # of the round without that peer
LEAST_S = 0.15  # seconds; less is a matter of this computer's scheduler
HISTORY, KNOWN = 48, 8  # rounds remembered of a peer, and needed before it is compared with itself
VOTES, WINDOW = 2, 3
CHRONIC, OFTEN, LATELY = 0.5, 7, 8  # effect, and in how many of the last rounds
SILENT_S = 3.0
MUTE = 0.75  # share of the time since the round was opened in which a stopped process says nothing
CLOCK_S = 2.0
FRESH = 5  # rounds for which a culprit is shown
DRASTIC = 2.0  # rounds; by such a growth one round suffices
LOST = 0.1  # share of TCP segments sent again, likewise
AGAIN = 10  # rounds without it, after which it is told again

# Counters of the machine, the most certain ones first, and what share of the difference each has to explain.
COUNTERS: tuple[tuple[str, Cause, float], ...] = (
    ("slept", "asleep", 0.4),
    ("stopped", "stopped", 0.4),
    ("memory", "memory", 0.25),
    ("throttled", "thermal", 0.4),
    ("io", "disk", 0.4),
    ("gpu_wait", "gpu load", 0.4),
    ("cpu_wait", "other load", 0.4),
)
PHASES: tuple[tuple[str, Cause], ...] = (
    ("compute", "compute"),
    ("encode", "compute"),
    ("apply", "compute"),
    ("upload", "upload"),
    ("download", "download"),
    ("lease", "download"),
    ("disk", "disk"),
)
SYMPTOMS: tuple[Cause, ...] = ("silent", "compute", "upload", "download")
SILENT_CAUSES: tuple[Cause, ...] = ("stopped", "silent")
CERTAIN: tuple[Cause, ...] = ("asleep", "stopped", "silent", "clock")


@dataclass(frozen=True)
class LeftOut:
    """A round that was committed without a peer's update."""

    round: int
    opened: float  # hub's monotonic seconds
    own: float  # seconds for which it was awaited
    without: float  # seconds that the round would have taken
    asked: bool = False  # its first report since has not explained it


@dataclass
class History:
    """Memory of one session."""

    name: str
    at: int = -1  # its newest round
    arrived: float = 0.0
    usual: deque[PeerSample] = field(default_factory=lambda: deque(maxlen=HISTORY))
    own: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    votes: deque[Cause | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slow: deque[bool] = field(default_factory=lambda: deque(maxlen=LATELY))
    left_out: LeftOut | None = None  # the newest, until a report since explains it
    mute: bool = False  # since it was left out, it was named from outside for saying nothing


@dataclass(frozen=True)
class Suspect:
    """A member that was slow in a round."""

    session: str
    sample: PeerSample
    own: float
    without: float

    @property
    def excess(self) -> float:
        return self.own - self.without

    @property
    def lengthened(self) -> float:
        return self.own / max(self.without, LEAST_S) - 1


@dataclass(frozen=True)
class Verdict:
    """Why a suspect was slow."""

    cause: Cause
    evidence: str
    certain: bool  # one round suffices
    grown: float  # seconds above the usual ones


class SlowRounds:
    """The last rounds of a run, and the culprits among its peers."""

    def __init__(self) -> None:
        self._known: dict[str, History] = {}  # by session
        self._hub = History(HUB)
        self._hub_times: deque[tuple[float, float]] = deque(maxlen=HISTORY)  # aggregation, disk
        self._named: dict[tuple[str, Cause], Culprit] = {}
        self.round = -1

    @property
    def culprits(self) -> list[Culprit]:
        """Return those of the last rounds, the worst first."""
        fresh = [one for one in self._named.values() if one.round > self.round - FRESH]
        return sorted(fresh, key=lambda one: (-one.lengthened, one.peer))

    def forget(self, session: str) -> None:
        self._known.pop(session, None)

    def add(self, sample: RoundSample) -> list[Culprit]:
        """Add a committed round. Returns those that are news."""
        self.round = sample.round
        owns = {
            session: own for session, one in sample.peers.items() if (own := self._own(sample, session, one))
        }
        found = self._of_clocks(sample)
        if not sample.uneven:
            suspects = {one.session: one for one in self._suspects(sample, owns)}
            for session in sample.peers:
                found += self._judge(sample, session, suspects.get(session))
            found += self._of_hub(sample, max(owns.values(), default=0.0))
        for session, sight in sample.sights.items():
            found += self._amid(session, sight)
        for session, peer in sample.peers.items():
            known = self._known.setdefault(session, History(peer.name))
            known.at, known.arrived = sample.round, peer.arrived
        return self._tell(found)

    def late(self, session: str, peer: PeerSample) -> list[Culprit]:
        """Add the report of a peer that a round has closed without: it says what has kept it."""
        known = self._known.get(session)
        if known is None or known.left_out is None or peer.spent is None:
            return []
        return self._tell(self._back(known, session, peer))

    def _amid(self, session: str, sight: Sight) -> list[Culprit]:
        """Name a peer that was left out by what the hub sees, where that is beyond doubt."""
        known = self._known.get(session)
        if known is None or known.left_out is None:
            return []
        if sight.silent < MUTE * (sight.silent + sight.heard - known.left_out.opened):
            sight = replace(sight, stopped=False)
        suspect = left_out(known, session, PeerSample(known.name, 0.0, spent=Spent(), sight=sight))
        verdict = explained(suspect, known.usual)
        if verdict is None or not verdict.certain:
            if sight.silent < SILENT_S:
                return []
            said = evidence_of("silent", suspect.sample, None)
            verdict = Verdict("silent", said, True, sight.silent)
        known.mute = known.mute or verdict.cause in SILENT_CAUSES
        lengthened = max(EFFECT, suspect.lengthened)
        one = Culprit(known.name, verdict.cause, verdict.evidence, lengthened, self.round, self.round)
        return [one]

    def _back(self, known: History, session: str, peer: PeerSample) -> list[Culprit]:
        """Vote on a peer that was left out, by the first report since: it says how long its update took."""
        missed = known.left_out
        assert missed is not None
        suspect = left_out(known, session, peer)
        verdict = explained(suspect, known.usual)
        again = verdict is None and not missed.asked  # it may have been stopped just after it had written
        known.left_out = replace(missed, asked=True) if again else None
        found = self._voted(known, suspect, verdict, self.round) if verdict else []
        if known.mute and found:  # from outside it looked silent, and says itself what kept it
            for cause in SILENT_CAUSES:
                if cause != found[0].cause:
                    self._named.pop((known.name, cause), None)
        known.mute = known.mute and again and not found
        return found

    # ---- who -----------------------------------------------------------------------------------------------

    def _own(self, sample: RoundSample, session: str, peer: PeerSample) -> float | None:
        """Return the seconds of a peer's own cycle; None: not known."""
        known = self._known.get(session)
        if known is None or known.at != sample.round - 1:
            return None
        if peer.spent is None:
            return peer.arrived - sample.opened
        idle = max(0.0, peer.seconds("idle") - peer.seconds("stopped") - peer.seconds("slept"))
        return max(peer.arrived - known.arrived - idle, peer.arrived - max(sample.opened, known.arrived))

    def _suspects(self, sample: RoundSample, owns: Mapping[str, float]) -> Iterable[Suspect]:
        if not owns:
            return
        if len(owns) == 1:
            (session, own), *_ = owns.items()
            before = self._known[session].own
            without = median(before) if len(before) >= KNOWN else own
            slow = {session}
        else:
            ordered = sorted(owns.values())
            typical = ordered[(len(ordered) - 2) // 2]  # the lower median of all but a slow one
            slow = {s for s, own in owns.items() if own > (1 + EFFECT) * typical}
            without = max((own for s, own in owns.items() if s not in slow), default=ordered[0])
        for session in slow:
            suspect = Suspect(session, sample.peers[session], owns[session], without)
            if suspect.excess >= LEAST_S and suspect.lengthened >= EFFECT:
                yield suspect

    def _judge(self, sample: RoundSample, session: str, suspect: Suspect | None) -> list[Culprit]:
        """Vote on one member, and remember its round."""
        peer = sample.peers[session]
        known = self._known.setdefault(session, History(peer.name))
        known.slow.append(suspect is not None and suspect.lengthened >= CHRONIC)
        verdict: Verdict | None = None
        if not peer.whole:
            if suspect is not None:
                known.left_out = LeftOut(sample.round, sample.opened, suspect.own, suspect.without)
            return []
        if known.left_out is not None and peer.spent is not None:
            return self._back(known, session, peer)
        if suspect is not None:
            verdict = explained(suspect, known.usual)
            if verdict is None and sum(known.slow) >= OFTEN:
                others = [one for other, one in sample.peers.items() if other != session]
                verdict = largest_phase(suspect, others, certain=True)
            if verdict is not None:
                return self._voted(known, suspect, verdict, sample.round)
        known.votes.append(None)
        known.usual.append(peer)
        if known.at == sample.round - 1:
            known.own.append(peer.arrived - known.arrived - peer.seconds("idle"))
        return []

    def _voted(self, known: History, suspect: Suspect, verdict: Verdict, round: int) -> list[Culprit]:
        known.votes.append(verdict.cause)
        if not verdict.certain and known.votes.count(verdict.cause) < VOTES:
            return []
        return [Culprit(known.name, verdict.cause, verdict.evidence, suspect.lengthened, round, round)]

    # ---- without a vote ------------------------------------------------------------------------------------

    def _of_clocks(self, sample: RoundSample) -> list[Culprit]:
        return [
            Culprit(peer.name, "clock", evidence_of("clock", peer, None), 0.0, sample.round, sample.round)
            for peer in sample.peers.values()
            if abs(peer.seconds("clock")) >= CLOCK_S and not peer.seconds("slept")
        ]

    def _of_hub(self, sample: RoundSample, rest: float) -> list[Culprit]:
        """Vote on the hub: its disk and its sums lengthen the round of everybody."""
        times, self_known = list(self._hub_times), self._hub
        found: list[Culprit] = []
        vote: Cause | None = None
        for number, cause in enumerate(("disk", "aggregation")):
            took = (sample.disk_s, sample.aggregate_s)[number]
            before = [time[number] for time in times]
            if len(before) < KNOWN or vote is not None:
                continue
            normal = Usual.of(before)
            above = normal.excess(took)
            if above >= max(LEAST_S, EFFECT * max(rest - above, LEAST_S)):
                vote = "disk" if cause == "disk" else "aggregation"
                what = "a round became durable" if vote == "disk" else "its updates were summed up"
                said = f"{what} in {seconds(took)}, usually {seconds(normal.seconds)}"
                self_known.votes.append(vote)
                if self_known.votes.count(vote) >= VOTES:
                    longer = above / max(rest - above, LEAST_S)
                    found.append(Culprit(HUB, vote, said, longer, sample.round, sample.round))
        if vote is None:
            self_known.votes.append(None)
            self._hub_times.append((sample.disk_s, sample.aggregate_s))
        return found

    # ---- telling -------------------------------------------------------------------------------------------

    def _has_reason(self, one: Culprit) -> bool:
        """Tell whether this peer has been named for a counter of its machine in the last rounds."""
        named = [self._named.get((one.peer, cause)) for _, cause, _ in COUNTERS]
        return any(reason is not None and one.round - reason.round <= FRESH for reason in named)

    def _tell(self, found: Iterable[Culprit]) -> list[Culprit]:
        """Remember culprits; return those that are news. A phase, or silence, is none of a peer whose machine
        has just told the reason: it follows from that."""
        news = []
        for one in found:
            key = one.peer, one.cause
            if one.cause in SYMPTOMS and self._has_reason(one):
                continue
            before = self._named.get(key)
            if before is not None and one.round - before.round <= FRESH:
                one = replace(one, since=before.since)
            if before is None:
                news.append(one)
            self._named[key] = one
        stale = [key for key, one in self._named.items() if one.round <= self.round - AGAIN]
        for key in stale:
            del self._named[key]
        return news


def left_out(known: History, session: str, peer: PeerSample) -> Suspect:
    """Describe a peer that was left out by what it says: of its update and aggregates, as large as usual."""
    missed, last = known.left_out, known.usual[-1] if known.usual else peer
    assert missed is not None
    assert peer.spent is not None
    told = replace(peer, upload_s=peer.spent.upload / 1000, up=last.up, down=last.down)
    return Suspect(session, told, missed.own, max(missed.without, LEAST_S))


def explained(suspect: Suspect, before: Sequence[PeerSample]) -> Verdict | None:
    """Find what explains that a peer was slower than the others: a counter of its machine, or a phase.

    A phase that has grown is explained by the first counter that has grown with it, however noisy that is.
    """
    peer, known = suspect.sample, len(before) >= KNOWN
    normal = {counter: usual(counter, peer, before) or Usual(0.0, 0.0) for counter, _, _ in COUNTERS}
    phase = largest_phase(suspect, before) if known else None
    for counter, cause, share in COUNTERS:
        took, one = peer.seconds(counter), normal[counter]
        above = one.excess(took) if phase is None or cause in CERTAIN else took - one.seconds
        if (known or cause in CERTAIN) and above >= share * (
            suspect.excess if phase is None else phase.grown
        ):
            drastic = above >= DRASTIC * suspect.without
            said = evidence_of(cause, peer, one if one.seconds > 0 else None)
            return Verdict(cause, said, cause in CERTAIN or drastic, above)
    return phase


def largest_phase(suspect: Suspect, before: Iterable[PeerSample], certain: bool = False) -> Verdict | None:
    """Find the phases of one cause that have grown by at least half of the difference."""
    samples, grown, normal = list(before), dict[Cause, float](), dict[Cause, float]()
    for phase, cause in PHASES:
        if (one := usual(phase, suspect.sample, samples)) is not None:
            grown[cause] = grown.get(cause, 0.0) + one.excess(suspect.sample.seconds(phase))
            normal[cause] = normal.get(cause, 0.0) + one.seconds * (phase not in ("encode", "apply"))
    cause = max(grown, key=lambda one: grown[one], default="compute")
    if grown.get(cause, 0.0) < 0.5 * suspect.excess:
        return None
    sure = grown[cause] >= DRASTIC * suspect.without or resent_by(cause, suspect.sample) >= LOST
    seen = suspect.sample.sight is not None and suspect.sample.sight.seconds(cause) > 0
    said = evidence_of(cause, suspect.sample, Usual(normal[cause], 0.0))
    return Verdict(cause, said, certain or sure or seen, grown[cause])
