"""One peer's stay, and the table of what can happen to it."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from transport.protocol import VERSIONS, Hello, Refused, RunSettings, versions

CALLED = {"base": "base weights"}  # for people; other things go by their own name
SHOWN = 12  # of a hash


class State(Enum):
    """Where a session stands."""

    JOINING = "joining"  # fetches and catches up
    READY = "ready"  # member of the next round that opens
    TRAINING = "training"  # member of the open round, whose update is expected
    SENT = "sent"  # its update of the open round is here
    APART = "apart"  # computes a lease that spans rounds; not a member again before it says that it is ready
    BEHIND = "behind"  # the round closed without it; not a member again before it is heard of


class Kind(Enum):
    """What can happen to a session."""

    READY = "says it is ready"
    OPENED = "a round opened with it"
    ARRIVED = "its report and its packet are here"
    CLOSED = "the round closed"
    PARTED = "the round closed, and its lease spans the next ones"
    LATE = "reports on a round that is closed"
    LEAVING = "begins to hand over what it leaves"  # no round waits for it any more
    BACK = "is back on another connection"  # a late report may have been lost with the old one


NEXT: dict[State, dict[Kind, State]] = {
    State.JOINING: {Kind.READY: State.READY},
    State.READY: {Kind.OPENED: State.TRAINING, Kind.LEAVING: State.BEHIND},
    State.TRAINING: {
        Kind.ARRIVED: State.SENT,
        Kind.CLOSED: State.BEHIND,
        Kind.PARTED: State.BEHIND,
        Kind.LEAVING: State.BEHIND,
    },
    State.SENT: {Kind.CLOSED: State.READY, Kind.PARTED: State.APART, Kind.LEAVING: State.BEHIND},
    State.APART: {Kind.READY: State.READY, Kind.LEAVING: State.BEHIND},
    State.BEHIND: {Kind.READY: State.READY, Kind.LATE: State.READY, Kind.BACK: State.READY},
}


@dataclass
class Session:
    """One peer's stay. Its connection may be lost in any state; it comes back within `grace`, or is gone."""

    id: str  # the secret the peer shows when it comes back
    key: str  # its CURVE key: who it is. None but its owner can come back as this session
    name: str
    hardware: str
    conn: bytes | None  # control connection; None: lost
    state: State
    since: float  # when it joined, or was restored
    seen: float  # when something last came from it
    lost_at: float = 0.0  # when the connection was lost
    grace: float = 0.0  # how long it may stay lost
    awaited: bool = False  # it took part before the hub was restarted, and has not come back yet
    pinged: float = 0.0
    owes: float | None = None  # since when it owes something; None: nothing
    claims: tuple[int, int] | None = None  # (round, fingerprint) of its Ready, until it is compared
    rtt: float | None = None  # seconds
    origin: str = ""  # where it comes from (wire.origin_of)
    accepted: int = 0  # packets that were
    left_out: int = 0  # rounds that were committed without its packet, though it was a member
    tokens: int = 0  # trained tokens counted
    compute_s: float = 0.0  # of the last step of each round whose packet was accepted, summed
    wait_s: float = 0.0  # that its device then waited for the exchange
    fits: int = 0  # bytes of an aggregate that it can fetch beside its compute; 0: not known
    share: float | None = None  # of the mean of the last round its packet was in; None: of none yet
    legacy: int = 0  # bytes of its residual that it has handed over
    owns: bool = False  # it can own shards
    address: str = ""  # where other members reach it
    looked_for: bool = False  # its door is being dialled
    rests: int = 0  # the round from which it may own again: nothing came of it before
    owned: set[int] = field(default_factory=set)  # shards that it owned, and has not handed over
    handing: bool = False  # what it hands over is being looked at
    trials: int = 0  # of its line


def refusal(m: Hello, settings: RunSettings, token: str | None, *, over: bool, peers: int) -> Refused | None:
    """Why this greeting gets no session; None: it does. `token`: None where a known key needs none."""
    if m.protocol not in VERSIONS:
        return wrong_version(m.protocol)
    if m.run != settings.run:
        return wrong_run(m.run)
    if token is not None and not same(m.token, token):
        return wrong_token()
    if over:
        return Refused("over", "the run is over")
    if differ := differences(m.versions, settings.versions):
        return Refused("version", differ)
    if settings.max_peers is not None and peers >= settings.max_peers:
        return Refused("full", f"the run has its {settings.max_peers} peers")
    return None


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What a peer has otherwise than the run, both sides named; empty: nothing. What it does not name is not
    compared."""
    return "; ".join(
        f"{CALLED.get(what, what)}: you have {theirs[what][:SHOWN]}, the run has {want[:SHOWN]}"
        for what, want in sorted(ours.items())
        if theirs.get(what, want) != want
    )


def wrong_version(protocol: int) -> Refused:
    update = "update cocktail" if protocol < max(VERSIONS) else "ask the run's owner to update cocktail"
    return Refused("protocol", f"you speak protocol {protocol}, this run needs {versions()}: {update}")


def wrong_run(run: str) -> Refused:
    """Not which run there is: whoever knows no more than the hub's key can ask."""
    return Refused("run", f"no run {run!r} here")


def wrong_token() -> Refused:
    return Refused("token", "the token in the run URL is not the one of this run, or no longer")


def same(a: str, b: str) -> bool:
    """Are two secrets equal, in a time that tells nothing."""
    return hmac.compare_digest(a.encode(), b.encode())


def clean_name(name: str) -> str:
    """A name that is safe to print, to sort by and to put into a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:40].strip("-.") or "peer"


def unique_name(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    return next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}-{i}") not in taken)
