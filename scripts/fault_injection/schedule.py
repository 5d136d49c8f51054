"""The schedule of faults: which, to whom and when, all of it from the seed, before anything is started.

Kinds are dealt like cards: each comes as often as it lies in the deck before any comes again, so a run of a
few minutes meets them all. A target has one fault at a time; what comes too early waits for the one before.
Where one begins each second or sooner, the run is hurried: harm is brief, and cheap kinds come oftener.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.swarms.commands import HUB, RELAY

JOINER = "guest"  # target of faults that happen to a further process, which never gets far


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    words: str  # for --help
    cards: int = 1  # in the deck
    target: str = "peer"  # peer, HUB, RELAY or JOINER
    lasts: tuple[float, float] = (0.0, 0.0)  # seconds, drawn between these; 0: an instant
    long: float = 0.0  # seconds it lasts now and then instead
    pause: tuple[float, float] = (0.0, 0.0)  # seconds until what was ended is started again
    ends: bool = False  # it ends the peer's process: not done to the one whose memory is watched
    brief: tuple[float, float] = (0.0, 0.0)  # seconds it lasts in a hurried run
    hurried: int = 4  # cards in the deck of such a run


AWAY: dict[str, Any] = {"lasts": (5.0, 5.0), "brief": (0.1, 2.5)}

KINDS: dict[str, Kind] = {
    "kill": Kind("kill -9, and back under the same name", 2, pause=(0.0, 4.0), ends=True, hurried=40),
    "leave": Kind(
        "asked to leave with a signal, and back under the same name",
        cards=2,
        pause=(0.0, 3.0),
        ends=True,
        hurried=12,
    ),
    "leave-early": Kind(
        "leaves, comes back, and is asked to leave while it joins",
        lasts=(2.0, 9.0),
        ends=True,
        brief=(0.0, 1.5),
    ),
    "stop": Kind("SIGSTOP, then SIGCONT", long=60.0, hurried=60, **AWAY),
    "dark": Kind(
        "nothing passes on its link either way, and no connection ends", long=60.0, hurried=40, **AWAY
    ),
    "half-open": Kind("its connections are swallowed without a word; new ones pass", hurried=12),
    "deaf": Kind("its line loses all that comes to it: one way only", long=60.0, hurried=40, **AWAY),
    "thin": Kind(
        "its line has 1 Mbit/s, or a twentieth of its rate in a lab",
        lasts=(15.0, 30.0),
        brief=(0.5, 2.0),
        hurried=40,
    ),
    "cut": Kind("its connections are cut (not in a lab)", hurried=100),
    "slow": Kind("ten times slower", lasts=(15.0, 30.0), brief=(0.5, 2.0), hurried=20),
    "clock": Kind("its wall clock is wrong by hours from now on", pause=(0.0, 1.0), ends=True, hurried=1),
    "twice": Kind(
        "another process joins under the same name, and leaves", lasts=(3.0, 15.0), brief=(0.5, 2.0)
    ),
    "memory": Kind("a joiner without enough memory", target=JOINER, hurried=1),
    "disk": Kind("a joiner with a full disk", target=JOINER, hurried=1),
    "relay-kill": Kind(
        "kill -9 of the relay of every other peer, then started again",
        target=RELAY,
        pause=(0.0, 2.0),
        hurried=2,
    ),
    "hub-kill": Kind(
        "kill -9 of the hub after so many seconds, then resume", target=HUB, pause=(0.0, 2.0), hurried=1
    ),
    "hub-kill-again": Kind(
        "kill -9 of the hub, and once more while it starts",
        target=HUB,
        lasts=(1.0, 9.0),
        brief=(0.1, 2.0),
        hurried=1,
    ),
    "hub-stop": Kind("SIGSTOP of the hub, then SIGCONT", target=HUB, long=40.0, hurried=1, **AWAY),
    "hub-lost": Kind(
        "the hub's machine is gone, disk and all; a standby takes over",
        target=HUB,
        lasts=(0.0, 3.0),
        brief=(0.0, 1.0),
        hurried=1,
    ),
    "hub-clock": Kind(
        "kill -9 of the hub; its wall clock is wrong by hours from now on", target=HUB, hurried=1
    ),
}
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
LONG_SHARE = 0.25  # of the faults that know a long form
HURRIED = 1.0  # seconds between two faults from which on a run is hurried,
HURRIED_LONG, HURRIED_PAUSE = 0.005, 0.1  # with so much of the long forms, and of the pauses
HUB_SHARE = 0.6  # of the time: then the hub is left alone
FIRST_LONG_AT = 60.0  # seconds: short runs go without


@dataclass(frozen=True)
class Fault:
    """One fault of the schedule. Times are seconds."""

    number: int
    at: float  # after the first committed round
    kind: str
    target: str  # a peer's name, HUB or JOINER
    lasts: float
    pause: float
    signal: str  # for those that ask somebody to leave
    hours: float  # for clocks: how wrong
    dose: float  # 0..1: whatever else is to be drawn: memory, whether a lost hub is silent


def schedule(
    seed: int, seconds: float, peers: Sequence[str], every: float, kinds: Sequence[str]
) -> Iterator[Fault]:
    """Draw the faults of a run in which one begins every `every` seconds on average, in the order of time.

    The last peer's process is left alive, and in the last part of the run the hub's too: only what lives for
    a while can show that its memory is flat.
    """
    random, hurried = Random(f"chaos {seed}"), every <= HURRIED
    long_share, pauses = (HURRIED_LONG, HURRIED_PAUSE) if hurried else (LONG_SHARE, 1.0)
    deck: list[str] = []
    now, number = random.expovariate(1 / every), 0
    while now < seconds:
        if not deck:
            known = [(name, KINDS[name]) for name in kinds]
            deck = [name for name, kind in known for _ in range(kind.hurried if hurried else kind.cards)]
            random.shuffle(deck)
        name = deck.pop()
        kind = KINDS[name]
        lasts = random.uniform(*(kind.brief if hurried else kind.lasts))
        is_long = random.random() < long_share
        if kind.long and is_long and now > FIRST_LONG_AT and now + kind.long < seconds:
            lasts = kind.long
        among = peers[:-1] if kind.ends and len(peers) > 1 else peers
        target = random.choice(among) if kind.target == "peer" else kind.target
        fault = Fault(
            number,
            at=round(now, 2),
            kind=name,
            target=target,
            lasts=round(lasts, 2),
            pause=round(pauses * random.uniform(*kind.pause), 2),
            signal=random.choice(SIGNALS),
            hours=round(random.choice((-1, 1)) * random.uniform(1, 48), 1),
            dose=round(random.random(), 3),
        )
        number += 1
        if kind.target != HUB or now <= HUB_SHARE * seconds or len(kinds) < len(KINDS) / 2:
            yield fault
        now += random.expovariate(1 / every)


def hub_kills(seed: int, times: int, kind: str = "hub-kill") -> Iterator[Fault]:
    """Draw nothing but kill -9 of the hub, each after it has lived for a random while with its peers back."""
    random = Random(f"{kind} {seed}")
    for number in range(times):
        lives = random.choice((random.uniform(0, 0.5), random.uniform(0, 6)))
        yield Fault(number, 0.0, kind, HUB, round(lives, 3), 0.0, "SIGKILL", 0.0, number % 2)
