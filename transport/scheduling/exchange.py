"""The round in progress: its members, and what has arrived of their updates. The rounds before it: answers
for peers that come back, loss curves, sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from transport import actions as do
from transport.ledger import HEADER_SIZE, Recovered, RungRow
from transport.membership import Session
from transport.protocol import hash_of_names, messages

from .figures import Evaluation, middle_norm
from .leases import Leases


@dataclass
class Exchange:
    """The round in progress, keyed by session: a peer that comes back in a new session is another member."""

    round: int
    step: int
    members: dict[str, str]  # session -> name, as it was opened
    leased: int  # samples
    opened: float  # shifts by the time that the hub was suspended
    deadline: float  # moves with each arriving update
    keys: dict[str, str] = field(default_factory=dict)  # name -> key
    spans: dict[str, int] = field(default_factory=dict)  # session -> rounds its lease lasts, above 1
    fits: int = 0  # bytes of an aggregate that members can fetch beside their compute; 0: not known
    rung: int = 0
    local_steps: int = 1

    noted: RungRow | None = None  # for the ledger, where the rung may change
    reports: dict[str, messages.Report] = field(default_factory=dict)
    uploads: set[str] = field(default_factory=set)  # sessions whose packet is here, whole
    claims: dict[str, list[int]] = field(default_factory=dict)  # session -> rounds its update delivers
    arrived: dict[str, float] = field(default_factory=dict)  # session -> seconds after the opening
    closed: float = 0.0  # seconds after the opening
    warned: bool = False  # the host was told that the deadline has passed
    counted: tuple[int, int] = (0, 0)  # updates here and missing when the deadline was last computed
    look_at: float = 0.0  # when to compute it again: that costs time for each member
    news: bool = False  # the two counts have changed since

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.members.values()))

    @cached_property
    def hash(self) -> str:
        return hash_of_names(self.names)

    @property
    def by_name(self) -> list[str]:
        """Sessions with an update, by name, never by arrival: float sums depend on order."""
        return sorted(self.claims, key=lambda session: self.members[session])

    def message(self, session: Session, steps: int, samples: int, ev: Evaluation | None) -> messages.Round:
        """Announce the round to a member: its lease, and its part where this round evaluates."""
        part = ev.part_of(session.id) if ev is not None and ev.round == self.round else None
        parts = ev.parts if ev is not None and part is not None else 0
        many = len(self.members) > messages.NAMED
        names = [] if many else list(self.names)
        message = messages.Round(self.round, self.step, steps, names, samples, True, part or 0, parts)
        if many:
            message = replace(message, count=len(self.members), names=self.hash)
        return replace(message, spans=self.spans.get(session.id, 1), fits=self.fits, rung=self.rung)

    def fingerprints(self, sessions: Iterable[str]) -> dict[int, dict[str, int]]:
        """Return what these members report of x', by the round of x' and session. Staleness puts it behind
        this round; where that falls, no report is of one round of x'."""
        found: dict[int, dict[str, int]] = {}
        for session in sessions:
            report = self.reports[session]
            found.setdefault(max(0, self.round - report.behind), {})[session] = report.fingerprint
        return found

    def claimed(self, leases: Leases) -> tuple[do.Claim, ...]:
        """Return the updates that have arrived, with the leases they deliver."""
        return tuple(
            do.Claim(
                peer=self.members[s],
                session=s,
                leases={r: leases.claimed(s, r) for r in self.claims[s]},
                loss_sum=self.reports[s].loss_sum,
                tokens=self.reports[s].tokens,
                figures=tuple(self.reports[s].figures),
                key=self.keys.get(self.members[s], ""),
            )
            for s in self.by_name
        )


OFFERED = 2  # snapshots: the newest, and the previous one for peers that are still fetching it
REASON, REASONS = 200, 100  # characters of a refusal, and refusals per message, so that it stays small
POINTS = 128  # of the loss curve
KEPT = 64  # rounds whose commit stays in memory


class Curve:
    """(step, loss) of a whole run at evenly spread rounds: beyond POINTS every second one is dropped."""

    def __init__(self, points: Iterable[tuple[int, float]] = ()) -> None:
        self.points: list[tuple[int, float]] = []
        self.seen, self.every = 0, 1
        for step, loss in points:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        if self.seen % self.every == 0:
            self.points.append((step, loss))
        if len(self.points) > POINTS:
            del self.points[1::2]
            self.every *= 2
        self.seen += 1

    @property
    def rounded(self) -> list[tuple[int, float]]:
        return [(step, round(loss, 4)) for step, loss in self.points]


class Commit:
    """A durable round, as each peer hears of it."""

    def __init__(self, message: messages.Committed) -> None:
        self.message = message
        self._accepted = frozenset(message.accepted)
        self._unnamed: messages.Committed | None = None  # of a round with many: without any name
        if len(message.accepted) > messages.NAMED:
            many, names = len(message.accepted), hash_of_names(message.accepted)
            self._unnamed = replace(message, accepted=[], refused={}, count=many, names=names)

    def to(self, name: str) -> messages.Committed:
        """Return the message for one peer: of many names its own at most."""
        if self._unnamed is None:
            return self.message
        message = replace(self._unnamed, accepted=[name] if name in self._accepted else [])
        why = self.message.refused.get(name)
        return message if why is None else replace(message, refused={name: why})


class RoundHistory:
    """Committed rounds of a run since its beginning, or since the hub was restarted."""

    def __init__(self, recovered: Recovered) -> None:
        last, evaluation = recovered.last, recovered.evaluation
        self.commits: dict[int, Commit] = {}
        self.loss = last.loss if last else None  # of the newest round that trained
        self.curve, self.held_out = Curve(recovered.losses), Curve(recovered.held_out)
        self.eval_loss = evaluation.loss if evaluation else None
        self.grad_norm: float | None = None  # before clipping, median over the peers of the newest round
        self.tokens = 0  # counted since this hub started
        self.log_bytes = last.record.end if last else 0  # of the packet log
        self.snapshots: list[messages.SnapshotOffer] = []  # what a joiner may begin with
        if last is not None:
            names = list(last.accepted)
            message = messages.Committed(last.round, last.length, last.sha256.hex(), names)
            self.commits[last.round] = Commit(message)

    def add(self, ex: Exchange, accepted: list[str], done: do.CommitDone) -> Commit:
        """Add a durable round with the updates of these sessions."""
        reports = [ex.reports[s] for s in accepted]
        if done.loss is not None:
            self.loss = done.loss
            self.curve.add(ex.step, self.loss)
        self.tokens += sum(done.tokens.values())
        norm = middle_norm((r.grad_norm for r in reports), self.grad_norm)
        self.grad_norm = self.grad_norm if norm is None else norm
        names = [ex.members[s] for s in accepted]
        refused = {name: why[:REASON] for name, why in sorted(done.rejected.items())[:REASONS]}
        message = messages.Committed(ex.round, done.size, done.sha256.hex(), names, refused)
        self.commits[ex.round] = commit = Commit(message)
        self.commits.pop(ex.round - KEPT, None)
        self.log_bytes += HEADER_SIZE + done.size
        return commit

    def evaluated(self, step: int, loss: float) -> None:
        """Add a held-out loss of x'."""
        self.eval_loss = loss
        self.held_out.add(step, loss)

    def offer(self, offers: Iterable[messages.SnapshotOffer]) -> None:
        """Announce the newest of these snapshots from now on."""
        self.snapshots = sorted(offers, key=lambda o: o.round)[-OFFERED:]
