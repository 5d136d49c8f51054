"""Events that a hub reports to its process through `Hub.events()`. This room prints nothing.

`at` is wall-clock seconds since 1970, for people and logs. Durations are monotonic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PAUSED = 75  # exit code of a run that was paused, to be continued


@dataclass(frozen=True)
class Event:
    at: float  # wall clock, seconds since 1970


@dataclass(frozen=True)
class PeerJoined(Event):
    """A session began: the peer catches up and will then say it is ready."""

    peer: str
    hardware: str
    round: int  # to catch up to
    origin: str = ""  # its address; of IPv6 the first 64 bits; empty: not known


@dataclass(frozen=True)
class PeerDeciding(Event):
    """Somebody with the token looks at the run and decides whether to join."""

    peer: str
    hardware: str


@dataclass(frozen=True)
class PeerDeclined(Event):
    """A visitor of PeerDeciding went without joining."""

    peer: str


@dataclass(frozen=True)
class PeerAsks(Event):
    """Somebody with the token waits for the host's approval."""

    peer: str
    hardware: str
    key: str  # 16 digits of it


@dataclass(frozen=True)
class PeerReady(Event):
    """The peer has the global model and is a member from the next round."""

    peer: str
    round: int
    joining_s: float  # since its Hello


@dataclass(frozen=True)
class PeerLeft(Event):
    """A session ended; its undelivered samples are back in the pool."""

    peer: str
    reason: str  # "left: ...", "connection lost", "silent for 30 s", ...
    legacy: int = 0  # bytes of its residual handoff
    how: str = "left"  # or "lost": connection or peer went silent; or "removed" by host or hub


@dataclass(frozen=True)
class RoundOpened(Event):
    round: int
    step: int
    steps: int
    members: tuple[str, ...]
    samples: int  # leased in this round, all members together
    exchange: bool


@dataclass(frozen=True)
class RoundCommitted(Event):
    """A round is durable: the global model has changed."""

    round: int
    step: int  # whole global batches counted so far
    steps: int
    counted: int  # samples counted so far
    loss: float | None  # mean over the trained tokens delivered in this round; None: no tokens
    tokens: int  # trained tokens delivered in this round
    members: tuple[str, ...]
    accepted: tuple[str, ...]
    fingerprint: int  # of the global model before this round, as all members reported it; 0: none has it yet
    size: int  # bytes of the aggregated packet
    packets: dict[str, int]  # bytes of each accepted packet
    tokens_by_peer: dict[str, int]
    compute_s: dict[str, float]  # each peer's last step
    wait_s: dict[str, float]  # of these its device waited for the exchange
    seconds: float  # since the round was opened
    up: dict[str, int] = field(default_factory=dict)  # bytes on the wire since the last commit, peer to hub
    down: dict[str, int] = field(default_factory=dict)  # hub to peer; both include ZMTP and CURVE framing
    fetched: dict[str, int] = field(default_factory=dict)  # of `down`: fetched before the peer was ready
    grad_norm: dict[str, float] = field(default_factory=dict)  # of each peer's last step, before clipping
    norm: float | None = None  # the middle one of these; None: there is none
    figures: tuple[float, ...] = ()  # as in EvaluationDone
    eta_s: float | None = None  # to the end of the run, at the rate of late; None: not known yet
    deadline: float = 0.0  # straggler deadline, seconds after the opening, as the last awaited update left it
    local_steps: int = 1  # steps of the round
    rung: str = ""  # of the round, for people
    need: float = 0.0  # steps whose compute an exchange of the recipe's own packets takes; 0: not known
    extra: dict[str, Any] = field(default_factory=dict)  # fields of extensions


@dataclass(frozen=True)
class OfExtension(Event):
    """An event that an extension has defined for those who show it."""

    told: Any


@dataclass(frozen=True)
class EvaluationDone(Event):
    """The held-out loss of the global model of `round`."""

    round: int
    step: int
    loss: float
    tokens: int  # terms of the loss: trained tokens, or samples
    final: bool  # True for the finished model
    figures: tuple[float, ...] = ()  # means of the objective's further figures, where it has some


@dataclass(frozen=True)
class Warned(Event):
    message: str
    peer: str | None = None


@dataclass(frozen=True)
class RunEnded(Event):
    finished: bool  # True: every sample was counted
    reason: str
    exit_code: int  # 0 finished or stopped by its host, PAUSED, 7 too few peers, 1 a bug, 8 disk full
    rounds: int
    counted: int
