"""One peer's session, its transition table, and the checks of its handshake."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from transport.protocol import RunSettings, messages, versions

CALLED = {"base": "base weights"}  # names for people, where they differ
SHOWN = 12  # of a hash


class State(Enum):
    """States of a session."""

    JOINING = "joining"  # fetches and catches up
    READY = "ready"  # member of the next round that opens
    TRAINING = "training"  # member of the open round, whose update is expected
    SENT = "sent"  # its update of the open round is here
    APART = "apart"  # computes a lease that spans rounds; not a member again before it says that it is ready
    BEHIND = "behind"  # the round closed without it; not a member again before it is heard of


class SessionEvent(Enum):
    """Events that move a session to another state."""

    READY = "says it is ready"
    OPENED = "a round opened with it"
    ARRIVED = "its report and its packet are here"
    CLOSED = "the round closed"
    PARTED = "the round closed, and its lease spans the next ones"
    LATE = "reports on a round that is closed"
    LEAVING = "begins its handoff"  # no round waits for it any more
    BACK = "is back on another connection"  # a late report may have been lost with the old one


SESSION_TRANSITIONS: dict[State, dict[SessionEvent, State]] = {
    State.JOINING: {SessionEvent.READY: State.READY},
    State.READY: {
        SessionEvent.READY: State.READY,  # it has caught up, for its turn
        SessionEvent.OPENED: State.TRAINING,
        SessionEvent.LEAVING: State.BEHIND,
    },
    State.TRAINING: {
        SessionEvent.ARRIVED: State.SENT,
        SessionEvent.CLOSED: State.BEHIND,
        SessionEvent.PARTED: State.BEHIND,
        SessionEvent.LEAVING: State.BEHIND,
    },
    State.SENT: {
        SessionEvent.CLOSED: State.READY,
        SessionEvent.PARTED: State.APART,
        SessionEvent.LEAVING: State.BEHIND,
    },
    State.APART: {SessionEvent.READY: State.READY, SessionEvent.LEAVING: State.BEHIND},
    State.BEHIND: {
        SessionEvent.READY: State.READY,
        SessionEvent.LATE: State.READY,
        SessionEvent.BACK: State.READY,
    },
}


@dataclass
class Session:
    """One peer's session. Its connection may be lost in any state; it resumes within `grace`, or ends."""

    id: str  # the secret the peer shows when it comes back
    key: str  # its CURVE key, which is its identity: only its holder can resume this session
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
    doubted: float = -inf  # when its process was said to be gone; nothing came since: it has no grace
    owes_since: float | None = None  # since when it owes something; None: nothing
    at: int = 0  # newest round whose x' it is known to have
    ready_claim: tuple[int, int] | None = None  # (round, fingerprint) of its Ready, until it is compared
    role: str = "peer"  # or an extension's: it trains nothing
    rtt: float | None = None  # seconds
    origin: str = ""  # network address (wire.origin_of)
    accepted: int = 0  # packets
    proven: bool = False  # one of its packets is in the run; else it is a newcomer
    recorded: bool = False  # it is in the ledger
    left_out: int = 0  # rounds that were committed without its packet, though it was a member
    missed: int = 0  # awaited rounds in a row that closed without its packet
    waits_until: int = 0  # the round from which a newcomer that missed some is a member again
    misjudged: int = 0  # evaluations of it that cannot be, were not those of others, or never came
    tokens: int = 0  # trained tokens counted
    compute_s: float = 0.0  # of the last step of each round whose packet was accepted, summed
    wait_s: float = 0.0  # that its device then waited for the exchange
    fits: int = 0  # bytes of an aggregate that it can fetch beside its compute; 0: not known
    uplink: float = 0.0  # bytes a second of its last update; 0: not measured
    share: float | None = None  # of the mean of the last round its packet was in; None: of none yet
    handoff: int = 0  # bytes of its residual that it has handed over
    address: str = ""  # where other peers reach it, as it says
    reachable: bool = False  # the hub has reached it there
    dialled: bool = False  # that address is being tried
    trials: int = 0  # uploads that measured its line


def refusal(
    m: messages.Hello, settings: RunSettings, token: str | None, *, over: bool, peers: int
) -> messages.Refused | None:
    """Return why this Hello gets no session, or None. `token`: None where a known key needs none."""
    if m.protocol not in messages.VERSIONS:
        return wrong_version(m.protocol)
    if m.run != settings.run:
        return wrong_run(m.run)
    if token is not None and not same(m.token, token):
        return wrong_token()
    if over:
        return messages.Refused("over", "the run is over")
    if differ := differences(m.versions, settings.versions):
        return messages.Refused("version", differ)
    if settings.max_peers is not None and peers >= settings.max_peers:
        return messages.Refused("full", f"the run has its {settings.max_peers} peers")
    return None


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Describe where a peer differs from the run; empty: nowhere. Only what the peer names is compared."""
    return "; ".join(
        f"{CALLED.get(what, what)}: you have {theirs[what][:SHOWN]}, the run has {want[:SHOWN]}"
        for what, want in sorted(ours.items())
        if theirs.get(what, want) != want
    )


def wrong_version(protocol: int) -> messages.Refused:
    update = (
        "update cocktail" if protocol < max(messages.VERSIONS) else "ask the run's host to update cocktail"
    )
    return messages.Refused(
        "protocol", f"you speak protocol {protocol}, this run needs {versions()}: {update}"
    )


def wrong_run(run: str) -> messages.Refused:
    """Refuse without naming the run that is here: anyone with the hub's key can ask."""
    return messages.Refused("run", f"no run {run!r} here")


def wrong_token() -> messages.Refused:
    return messages.Refused("token", "the token in the run URL is not the one of this run, or no longer")


def same(a: str, b: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(a.encode(), b.encode())


@dataclass(frozen=True)
class TrafficDelta:
    """Bytes moved within a period."""

    up: int = 0  # peer to hub
    down: int = 0
    fetched: int = 0  # of `down`: before the peer was ready


@dataclass
class Traffic:
    """Bytes on the wire of one session, ZMTP and CURVE framing included."""

    up: int = 0  # peer to hub
    down: int = 0
    ready: int | None = None  # `down` when the peer had caught up; None: it has not
    told: TrafficDelta | None = None  # sums at the last `tell`

    @property
    def sums(self) -> TrafficDelta:
        return TrafficDelta(self.up, self.down, self.down if self.ready is None else self.ready)

    def tell(self) -> TrafficDelta:
        """Return the bytes since the last call."""
        now, before = self.sums, self.told or TrafficDelta()
        self.told = now
        return TrafficDelta(now.up - before.up, now.down - before.down, now.fetched - before.fetched)
