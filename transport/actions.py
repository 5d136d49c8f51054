"""Actions that the hub's state machine asks of the shell around it, and the shell's answer to a commit."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from transport.ledger import EvaluationRow, KnownPeer, OpenSession, RungRow
from transport.protocol import Event, SampleRanges, events, messages

NUMBERS, KIND = re.compile(r"[\d.,:e+\[\] -]*\d"), 120  # of a warning; characters that tell two apart


class Action:
    """One thing that the shell is to do."""


@dataclass(frozen=True)
class Send(Action):
    conn: bytes
    message: messages.Message


@dataclass(frozen=True)
class Tell(Action):
    """Yield this event to the host (the shell fills in `at`)."""

    event: Event


@dataclass(frozen=True)
class RecordStanding(Action):
    """Write the standing of a key into the ledger."""

    known: KnownPeer


@dataclass(frozen=True)
class RecordEvaluation(Action):
    """Write a finished evaluation into the ledger."""

    row: EvaluationRow


@dataclass(frozen=True)
class SendDurably(Action):
    """Send this once everything requested before is in the ledger."""

    conn: bytes
    message: messages.Message


@dataclass(frozen=True)
class Forget(Action):
    """Drop the uploads and connections of an ended session, and strike it from the ledger."""

    session: str
    origin: str = ""
    recorded: bool = True  # it is in the ledger


@dataclass(frozen=True)
class GiveBack(Action):
    """Strike a revoked lease from the ledger."""

    session: str
    round: int


@dataclass(frozen=True)
class Lease(Action):
    """Write the leases of a round into the ledger, with sessions that have none yet, then call
    `leased(round)`."""

    round: int
    leases: dict[str, SampleRanges]  # by session
    fits: int = 0  # bytes that the aggregate should not exceed; 0: not known
    rung: int = 0  # of the round
    sessions: tuple[OpenSession, ...] = ()  # that the ledger does not have


@dataclass(frozen=True)
class Claim(Action):
    """One update that arrived in time, and the leases it delivers."""

    peer: str
    session: str
    leases: dict[int, SampleRanges]  # by the round that leased them
    loss_sum: float
    tokens: int  # terms of the loss, as the peer reports them
    figures: tuple[float, ...] = ()  # as messages.Report
    key: str = ""  # of the peer


@dataclass(frozen=True)
class Commit(Action):
    """Aggregate these updates, make the round durable, then call `committed(CommitDone)` (or `failed`)."""

    round: int
    step: int
    members: tuple[str, ...]
    claims: tuple[Claim, ...]  # sorted by peer
    fingerprints: dict[int, int]  # of x', by round, as the updates' senders have it, and nobody disputes
    last_loss: float | None = None  # of the round before; None: there was none
    rung: RungRow | None = None  # None: the run has one
    refused: dict[str, str] = field(default_factory=dict)  # peer -> why its update is left out


@dataclass(frozen=True)
class Inherit(Action):
    """Merge a leaver's handoff before the next aggregation."""

    session: str
    peer: str
    share: float  # of the mean


@dataclass(frozen=True)
class Reach(Action):
    """Dial the address at which a peer says that others reach it, then call `reached`."""

    session: str
    address: str
    key: str


@dataclass(frozen=True)
class FindFingerprint(Action):
    """Fold the ledger to the fingerprint of x' of `round`, then call `fingerprinted`."""

    round: int


@dataclass(frozen=True)
class RecordFingerprint(Action):
    """Write the fingerprint of x' of a round, as a replay of the ledger has told, into its row."""

    round: int
    fingerprint: int


@dataclass(frozen=True)
class End(Action):
    """Serve what peers still fetch, then stop: the run is over."""


@dataclass(frozen=True, kw_only=True)
class CommitDone:
    """The shell's answer to Commit. Without `packets` nothing was committed."""

    round: int
    size: int = 0  # bytes of the aggregate
    sha256: bytes = b""
    packets: dict[str, int] = field(default_factory=dict)  # peer -> bytes of its accepted packet
    tokens: dict[str, int] = field(default_factory=dict)  # peer -> tokens delivered, counted by the hub
    loss: float | None = None  # of the round (figures.py); None: no peer has reported one that can be
    figures: tuple[float, ...] = ()  # likewise, the means of the objective's further figures
    impossible: dict[str, str] = field(default_factory=dict)  # peer -> why its loss is not in there
    weights: dict[str, float] = field(default_factory=dict)  # peer -> weight of its packet in the mean
    rejected: dict[str, str] = field(default_factory=dict)  # peer -> why its packet could not be used
    extra: dict[str, dict[str, bytes]] = field(default_factory=dict)  # session -> bodies of extensions


class Shell(Protocol):
    """Threads of the shell; each method may be called from any of them."""

    def apply(self, change: Callable[[float], object]) -> None:
        """Call `change(now)` on the state machine in the I/O thread, then perform the actions it caused."""

    def later(self, job: Callable[[], object]) -> None:
        """Run a job in the commit thread, after those it was given before."""

    def warn(self, peer: str, message: str) -> None:
        """Tell the host something about a peer."""

    def fail(self, error: Exception, reason: str, exit_code: int) -> None:
        """End the run because of this error."""


class Abandoned(Exception):
    """The run ended before its updates were summed: the round stays uncommitted."""


class Repetitions:
    """Counts what is told again and again: of each peer once, and then at 10, 100, 1000 times.

    Of many peers (names are free) the first EACH are told, and then the 100th, the 1000th.
    """

    EACH, MOST = 20, 4096  # peers told of one by one; counters kept

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()  # (peer; "": of all, what) -> times

    def count(self, peer: str, what: str) -> int:
        """Count once more. Returns how many times by now, 0 where it is not to be told."""
        times, peers = self._add((peer, what)), 0
        if times == 1 and peer:
            peers = self._add(("", what))
        return times if is_power(times) and (peers <= self.EACH or is_power(peers)) else 0

    def _add(self, key: tuple[str, str]) -> int:
        times = self._counts.pop(key, 0) + 1
        self._counts[key] = times
        if len(self._counts) > self.MOST:
            self._counts.popitem(last=False)
        return times


def is_power(times: int) -> bool:
    """Tell whether a count is 1, 10, 100, ..."""
    return str(times).rstrip("0") == "1"


class Outbox:
    """Actions that the current input has caused so far."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._ended = False
        self.repetitions = Repetitions()

    def add(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, conn: bytes | None, message: messages.Message) -> None:
        """Send, or drop where the connection is lost: what matters is said again when the peer is back."""
        if conn is not None:
            self.add(Send(conn, message))

    def refuse(self, conn: bytes | None, code: str, reason: str) -> None:
        self.send(conn, messages.Refused(code, reason))

    def tell(self, event: Event) -> None:
        """Tell the host, or drop after RunEnded, which is promised to be the last event."""
        if not self._ended:
            self._ended = isinstance(event, events.RunEnded)
            self.add(Tell(event))

    def warn(self, message: str, peer: str | None = None) -> None:
        """Warn the host: once of each peer and reason, whatever numbers are in it, then of how often."""
        times = self.repetitions.count(peer or "", NUMBERS.sub("#", message)[:KIND])
        if times:
            often = f" ({times} times so far)" if times > 1 else ""
            self.tell(events.Warned(0.0, message + often, peer))

    def drain(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
