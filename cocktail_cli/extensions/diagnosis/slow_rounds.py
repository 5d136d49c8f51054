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

What a hub sees of a peer that a round goes on without (`Sight`), by the bytes of its connections:

    stopped   nothing comes, and its machine acknowledges all that it is sent: its process says nothing
    up        part of a message is here, and more of it comes: its line up carries its update slowly
    down      what it is sent is acknowledged a little at a time, and nothing is on its way up
    dark      nothing comes, and nothing is acknowledged

A process without a core sends a message at its line's rate once it runs, so nothing is half here for long.
It also says something now and then, so SlowRounds asks for a silence of most of the time since the round was
opened before it calls a process stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING

from .bodies import Culprit, NamedCulprit, Spent

if TYPE_CHECKING:
    from transport.wire import Crossed

STOPPED_S, ANSWERS_S = 2.0, 0.8  # of silence, and how much later its machine has acknowledged a ping
MOVES_S = 1.5  # seconds; bytes that came or were acknowledged within them move
PACKET = 1400  # bytes; fewer are pings, whose acknowledgements may wait behind its update


@dataclass(frozen=True)
class Moving:
    """An object, or what a peer was sent, on its way."""

    seconds: float  # so far
    came: int  # bytes
    size: int = 0  # 0: not known


@dataclass(frozen=True)
class Sight:
    """A peer as the hub sees it now."""

    silent: float = 0.0  # seconds since something last came from it
    heard: float = 0.0  # when that was, in the hub's monotonic seconds
    stopped: bool = False
    dark: bool = False
    up: Moving | None = None
    down: Moving | None = None

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase of its round, or a counter of its machine, so far; 0: not seen."""
        if phase in ("silent", "stopped"):
            return self.silent if phase == "silent" or self.stopped else 0.0
        moving = {"upload": self.up, "download": self.down}.get(phase)
        return moving.seconds if moving is not None else 0.0

    @classmethod
    def of(cls, lines: Sequence[Crossed], said: float, update: Moving | None, now: float) -> Sight:
        """See a peer.

        Args:
            lines: its connections.
            said: when its last whole message came.
            update: its update on its way, of which whole chunks are counted; None: there is none.
        """
        heard = max([said, *(line.received_at for line in lines)])
        answered = max((line.acknowledged_at for line in lines), default=0.0)
        caught_up, silent = min((line.caught_up_at for line in lines), default=0.0), now - heard
        partly, owed = sum(line.partly for line in lines), [line for line in lines if line.unacknowledged]
        up = down = None
        if partly and update is not None and silent < MOVES_S:
            up = Moving(update.seconds, min(update.size, update.came + partly), update.size)
        elif not partly and now - answered < MOVES_S:
            slow = [line for line in owed if min(line.acknowledged, line.unacknowledged) >= PACKET]
            since = min((line.caught_up_at for line in slow), default=0.0)
            down = Moving(now - since, sum(line.acknowledged for line in slow)) if slow else None
        alone = all(line.is_peers for line in lines)  # what a relay acknowledges says nothing of the peer
        return cls(
            silent,
            heard,
            stopped=alone and silent >= STOPPED_S and min(answered, caught_up) >= heard + ANSWERS_S,
            dark=alone and bool(owed) and now - max(heard, answered) >= STOPPED_S,
            up=up,
            down=down,
        )


TENTHS = 2.563  # standard deviations between the lowest and the highest tenth
SPREAD = 0.05  # the least: nothing on a computer is more regular
TICK = 0.01  # seconds; less is not measured well


@dataclass(frozen=True)
class PeerSample:
    """One member's part in a round."""

    name: str
    arrived: float  # hub's monotonic seconds: its update was whole, or the round closed without it
    compute_s: float = 0.0  # of the lease before
    wait_s: float = 0.0  # that its device then waited for the exchange
    samples: int = 0  # of that lease; 0: not known
    cost: float = 0.0  # of these samples, as the load balancer sees it
    upload_s: float = 0.0  # from its report to its whole update
    up: int = 0  # bytes of its update; 0: not known
    down: int = 0  # bytes of the aggregate that it has fetched since its last update
    spent: Spent | None = None
    whole: bool = True  # False: the round closed without its update
    sight: Sight | None = None  # what the hub sees of a peer that the round went on without

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase of its round, or of a counter of its machine: a field of `Spent`."""
        if phase in ("compute", "upload"):
            measured = self.compute_s if phase == "compute" else self.upload_s
        else:
            measured = getattr(self.spent, phase) / 1000 if self.spent is not None else 0.0
        return measured if self.sight is None else max(measured, self.sight.seconds(phase))

    def sizes(self, phase: str) -> tuple[float, ...]:
        """Return what the seconds of a phase are in proportion to; 0: not known, (1,): to nothing."""
        if phase == "compute":
            return self.samples, self.cost
        return ({"upload": self.up, "download": self.down}.get(phase) or 1,)


@dataclass(frozen=True)
class RoundSample:
    """One committed round."""

    round: int
    opened: float  # hub's monotonic seconds
    peers: dict[str, PeerSample] = field(default_factory=dict)  # by session
    sights: dict[str, Sight] = field(default_factory=dict)  # of sessions that it has gone on without
    aggregate_s: float = 0.0  # of the hub
    disk_s: float = 0.0  # of the hub: until the round was durable
    uneven: bool = False  # peers had other work too: an evaluation


@dataclass(frozen=True)
class Usual:
    """Usual seconds of a phase, and how far they spread: a standard deviation of their logarithm."""

    seconds: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Usual:
        """Summarise at least one value. Few values make the spread larger, as it is not well known then."""
        logs, cut = sorted(log(max(value, TICK)) for value in values), len(values) // 10
        spread = (logs[-1 - cut] - logs[cut]) / TENTHS
        return cls(median(values), max(SPREAD, spread) * (1 + 8 / len(values)))

    def excess(self, seconds: float, sigmas: float = 4.0) -> float:
        """Return the seconds above the usual ones; 0 within `sigmas` of them."""
        most = max(self.seconds, TICK) * exp(sigmas * self.spread)
        return seconds - self.seconds if seconds > most else 0.0


def usual(phase: str, of: PeerSample, before: Iterable[PeerSample]) -> Usual | None:
    """Estimate the usual seconds of a phase from other samples, for a round as large as `of`; None: unknown.

    Where two sizes are known, samples and their cost, the larger estimate counts: neither is exact.
    """
    found = []
    for number, size in enumerate(of.sizes(phase)):
        pairs = [(one.seconds(phase), one.sizes(phase)) for one in before]
        if values := [size * seconds / sizes[number] for seconds, sizes in pairs if size and sizes[number]]:
            found.append(Usual.of(values))
    return max(found, key=lambda one: one.seconds, default=None)


REMEDIES = {  # by cause
    "asleep": "keep that machine from sleeping: power settings, or the mains for a laptop",
    "stopped": "let its process run: SIGSTOP or a paused container freezes it, others may starve it",
    "silent": "see whether that machine is on, its process not stopped, and its line up",
    "memory": "end other programs there, or join with a smaller --micro-batch-size",
    "thermal": "cool that machine, or clean its fans; --max-temp pauses it before it is slowed down",
    "disk": "set COCKTAIL_HOME (a hub: -o) to a faster disk, or end what keeps that disk busy",
    "other load": "end other programs there, or raise its priority or its quota of cores",
    "gpu load": "end other programs on that GPU, or join with --only-idle",
    "compute": "see what slows its device; its share of the batch follows its speed within three rounds",
    "upload": "see who else sends on that line, and its Wi-Fi; compression.topk_ratio bounds its packets",
    "download": "see who else receives on that line, and its Wi-Fi; compression.topk_ratio bounds packets",
    "clock": "keep the clock of that machine right: timedatectl set-ntp true",
    "aggregation": "end other programs on the hub's machine, or take one with more cores",
}


def evidence_of(cause: str, sample: PeerSample, usual: Usual | None) -> str:
    """Describe what was measured, beside what is usual there."""
    seen = sample.sight if cause in SEEN else None
    said = SEEN[cause](seen) if seen is not None and seen.seconds(cause) else measured(cause, sample)
    before = f", usually {seconds(usual.seconds)}" if usual is not None else ""
    resent = resent_by(cause, sample)
    return f"{said}{before}{f'; {resent:.0%} of its TCP segments were sent again' if resent >= LOSSY else ''}"


LOSSY = 0.02  # share of TCP segments sent again from which a line is said to lose some


def resent_by(cause: str, sample: PeerSample) -> float:
    """Return the share of TCP segments that were sent again, where the cause is the line; else 0."""
    if cause not in ("upload", "download") or sample.spent is None:
        return 0.0
    return sample.spent.resent / 1000


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def rate(size: int, took: float) -> str:
    return f" ({8e-6 * size / took:.2g} Mbit/s)" if size and took > 0 else ""


def measured(cause: str, sample: PeerSample) -> str:
    """Describe what was measured at a peer."""
    match cause:
        case "compute":
            many = f" for {sample.samples} samples" if sample.samples > 1 else ""
            return f"it computed for {seconds(sample.compute_s)}{many}"
        case "upload":
            took = sample.upload_s
            return f"its update took {seconds(took)}{rate(sample.up, took)} to arrive"
        case "download":
            took = sample.seconds("download") + sample.seconds("lease")
            return f"it fetched for {seconds(took)}{rate(sample.down, took)}"
        case "clock":
            ahead = sample.seconds("clock")
            return f"its clock was set {abs(ahead):,.0f} s {'forward' if ahead > 0 else 'back'}"
        case "disk":
            return f"it waited for its disk for {seconds(max(sample.seconds('io'), sample.seconds('disk')))}"
    counter, _, what = COUNTERS[cause]
    faults = sample.spent.faults if cause == "memory" and sample.spent is not None else 0
    pages = f", and {faults:,} of its pages were read from disk" if faults else ""
    return f"{what} for {seconds(sample.seconds(counter))} of {seconds(sample.seconds('cycle'))}{pages}"


def _silent(sight: Sight) -> str:
    nor = ", and what it is sent is not acknowledged" if sight.dark else ""
    return f"nothing has come from it for {seconds(sight.silent)}{nor}"


def _slowly(what: str, moving: Moving | None) -> str:
    """Describe what is on its way; it is only called where something is."""
    assert moving is not None
    part = f"{moving.came / 1000:.0f}{f' of {moving.size / 1000:.0f}' if moving.size else ''} kB"
    return f"{part} of {what} in {seconds(moving.seconds)}{rate(moving.came, moving.seconds)}"


SEEN: dict[str, Callable[[Sight], str]] = {
    "silent": _silent,
    "stopped": lambda s: (
        f"its machine acknowledges what it is sent, its process has said nothing for {seconds(s.silent)}"
    ),
    "upload": lambda s: _slowly("its update have come", s.up),
    "download": lambda s: _slowly("what it was sent are acknowledged", s.down),
}


HUB = "the hub"
HUB_WORK = {"disk": "a round became durable", "aggregation": "its updates were summed up"}
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

# Counters of the machine by cause, the most certain ones first: what share of the difference each has to
# explain, and what it counts.
COUNTERS = {
    "asleep": ("slept", 0.4, "that machine was suspended"),
    "stopped": ("stopped", 0.4, "its process did not run"),
    "memory": ("memory", 0.25, "its tasks stood still for lack of memory"),
    "thermal": ("throttled", 0.4, "its device was slowed down for heat or power"),
    "disk": ("io", 0.4, "it waited for its disk"),
    "gpu load": ("gpu_wait", 0.4, "other programs used its GPU"),
    "other load": ("cpu_wait", 0.4, "a thread that could run waited for a core"),
}
PHASES: tuple[tuple[str, str], ...] = (
    ("compute", "compute"),
    ("encode", "compute"),
    ("apply", "compute"),
    ("upload", "upload"),
    ("download", "download"),
    ("lease", "download"),
    ("disk", "disk"),
)
SYMPTOMS: tuple[str, ...] = ("silent", "compute", "upload", "download")
SILENT_CAUSES: tuple[str, ...] = ("stopped", "silent")
CERTAIN: tuple[str, ...] = ("asleep", "stopped", "silent", "clock")


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
    votes: deque[str | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slow: deque[bool] = field(default_factory=lambda: deque(maxlen=LATELY))
    left_out: LeftOut | None = None  # the newest, until a report since explains it
    mute: bool = False  # since it was left out, it was named from outside for saying nothing


@dataclass(frozen=True)
class Suspect:
    """A member that was slow in a round."""

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

    cause: str
    evidence: str
    certain: bool  # one round suffices
    grown: float  # seconds above the usual ones


class SlowRounds:
    """The last rounds of a run, and the culprits among its peers."""

    def __init__(self) -> None:
        self._known: dict[str, History] = {}  # by session
        self._hub = History(HUB)
        self._hub_times: deque[Mapping[str, float]] = deque(maxlen=HISTORY)  # by its work
        self._named: dict[tuple[str, str], NamedCulprit] = {}
        self.round = -1

    @property
    def culprits(self) -> list[NamedCulprit]:
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
            suspects = self._suspects(sample, owns)
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
        return self._tell(self._back(known, peer))

    def _amid(self, session: str, sight: Sight) -> list[Culprit]:
        """Name a peer that was left out by what the hub sees, where that is beyond doubt."""
        known = self._known.get(session)
        if known is None or known.left_out is None:
            return []
        if sight.silent < MUTE * (sight.silent + sight.heard - known.left_out.opened):
            sight = replace(sight, stopped=False)
        suspect = left_out(known, PeerSample(known.name, 0.0, spent=Spent(), sight=sight))
        verdict = explained(suspect, known.usual)
        if verdict is None or not verdict.certain:
            if sight.silent < SILENT_S:
                return []
            said = evidence_of("silent", suspect.sample, None)
            verdict = Verdict("silent", said, True, sight.silent)
        known.mute = known.mute or verdict.cause in SILENT_CAUSES
        lengthened = max(EFFECT, suspect.lengthened)
        return [self._culprit(known.name, verdict.cause, verdict.evidence, lengthened)]

    def _back(self, known: History, peer: PeerSample) -> list[Culprit]:
        """Vote on a peer that was left out, by the first report since: it says how long its update took."""
        missed = known.left_out
        assert missed is not None
        suspect = left_out(known, peer)
        verdict = explained(suspect, known.usual)
        again = verdict is None and not missed.asked  # it may have been stopped just after it had written
        known.left_out = replace(missed, asked=True) if again else None
        found = self._voted(known, verdict, suspect.lengthened) if verdict else []
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

    def _suspects(self, sample: RoundSample, owns: Mapping[str, float]) -> dict[str, Suspect]:
        """Find the members, by session, for which the others had to wait."""
        if not owns:
            return {}
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
        found = {session: Suspect(sample.peers[session], owns[session], without) for session in slow}
        return {s: one for s, one in found.items() if one.excess >= LEAST_S and one.lengthened >= EFFECT}

    def _judge(self, sample: RoundSample, session: str, suspect: Suspect | None) -> list[Culprit]:
        """Vote on one member, and remember its round."""
        peer = sample.peers[session]
        known = self._known.setdefault(session, History(peer.name))
        known.slow.append(suspect is not None and suspect.lengthened >= CHRONIC)
        if not peer.whole:
            if suspect is not None:
                known.left_out = LeftOut(sample.round, sample.opened, suspect.own, suspect.without)
            return []
        if known.left_out is not None and peer.spent is not None:
            return self._back(known, peer)
        if suspect is not None:
            verdict = explained(suspect, known.usual)
            if verdict is None and sum(known.slow) >= OFTEN:
                others = [one for other, one in sample.peers.items() if other != session]
                verdict = largest_phase(suspect, others, certain=True)
            if verdict is not None:
                return self._voted(known, verdict, suspect.lengthened)
        known.votes.append(None)
        known.usual.append(peer)
        if known.at == sample.round - 1:
            known.own.append(peer.arrived - known.arrived - peer.seconds("idle"))
        return []

    def _voted(self, known: History, verdict: Verdict, lengthened: float) -> list[Culprit]:
        known.votes.append(verdict.cause)
        if not verdict.certain and known.votes.count(verdict.cause) < VOTES:
            return []
        return [self._culprit(known.name, verdict.cause, verdict.evidence, lengthened)]

    def _culprit(self, peer: str, cause: str, evidence: str, lengthened: float) -> Culprit:
        return Culprit(peer, cause, evidence, REMEDIES[cause], round(lengthened, 3), self.round)

    # ---- without a vote ------------------------------------------------------------------------------------

    def _of_clocks(self, sample: RoundSample) -> list[Culprit]:
        return [
            self._culprit(peer.name, "clock", evidence_of("clock", peer, None), 0.0)
            for peer in sample.peers.values()
            if abs(peer.seconds("clock")) >= CLOCK_S and not peer.seconds("slept")
        ]

    def _of_hub(self, sample: RoundSample, rest: float) -> list[Culprit]:
        """Vote on the hub: its disk and its sums lengthen the round of everybody."""
        took = {"disk": sample.disk_s, "aggregation": sample.aggregate_s}
        if len(self._hub_times) >= KNOWN:
            for cause, what in HUB_WORK.items():
                normal = Usual.of([times[cause] for times in self._hub_times])
                above = normal.excess(took[cause])
                without = max(rest - above, LEAST_S)
                if above >= max(LEAST_S, EFFECT * without):
                    said = f"{what} in {seconds(took[cause])}, usually {seconds(normal.seconds)}"
                    return self._voted(self._hub, Verdict(cause, said, False, above), above / without)
        self._hub.votes.append(None)
        self._hub_times.append(took)
        return []

    # ---- telling -------------------------------------------------------------------------------------------

    def _has_reason(self, one: Culprit) -> bool:
        """Tell whether this peer has been named for a counter of its machine in the last rounds."""
        named = [self._named.get((one.peer, cause)) for cause in COUNTERS]
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
            if before is None:
                news.append(one)
            since = before.since if before is not None and one.round - before.round <= FRESH else one.round
            self._named[key] = NamedCulprit(**vars(one), since=since)
        fresh = {key: one for key, one in self._named.items() if one.round > self.round - AGAIN}
        self._named = fresh
        return news


def left_out(known: History, peer: PeerSample) -> Suspect:
    """Describe a peer that was left out by what it says: of its update and aggregates, as large as usual."""
    missed, last = known.left_out, known.usual[-1] if known.usual else peer
    assert missed is not None
    assert peer.spent is not None
    told = replace(peer, upload_s=peer.spent.upload / 1000, up=last.up, down=last.down)
    return Suspect(told, missed.own, max(missed.without, LEAST_S))


def explained(suspect: Suspect, before: Sequence[PeerSample]) -> Verdict | None:
    """Find what explains that a peer was slower than the others: a counter of its machine, or a phase.

    A phase that has grown is explained by the first counter that has grown with it, however noisy that is.
    """
    peer, known = suspect.sample, len(before) >= KNOWN
    phase = largest_phase(suspect, before) if known else None
    for cause, (counter, share, _) in COUNTERS.items():
        took, one = peer.seconds(counter), usual(counter, peer, before) or Usual(0.0, 0.0)
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
    samples, grown, normal = list(before), dict[str, float](), dict[str, float]()
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
