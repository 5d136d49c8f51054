"""The round in progress: its members, and what has arrived of their updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from transport import actions as do
from transport.ledger import RoundRow
from transport.membership import Session, TrafficDelta
from transport.protocol import events, hash_of_names, messages

from .evaluation import Evaluation
from .leases import Leases
from .step_ladder import need_of_round


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
    local_steps: int = 1

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
        return replace(message, spans=self.spans.get(session.id, 1), fits=self.fits)

    def waited(self, session: str) -> float:
        """Return the seconds that a member's update has waited for others; 0: it has not arrived in time."""
        return max(0.0, self.closed - self.arrived.get(session, self.closed))

    def fingerprints(self, sessions: Iterable[str]) -> dict[int, dict[str, int]]:
        """Return what these members report of x', by the round of x' and session."""
        found: dict[int, dict[str, int]] = {}
        for session in sessions:
            report = self.reports[session]
            known = max(0, self.round - report.behind)  # the round of x' whose fingerprint it is
            found.setdefault(known, {})[session] = report.fingerprint
        return found

    def commit(self, leases: Leases, refused: dict[str, str], fingerprints: dict[int, int]) -> do.Commit:
        """Ask the shell to aggregate what has arrived and to make it durable; without the `refused` peers,
        each with the reason. `fingerprints`: of x' by round, as far as it is not disputed."""
        claims = tuple(
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
        return do.Commit(
            round=self.round,
            step=self.step,
            members=self.names,
            claims=claims,
            fingerprints=fingerprints,
            refused=refused,
        )

    def need(self, accepted: Iterable[str], done: do.CommitDone) -> float:
        """Return the local steps that this round's exchange needed; 0: not known."""
        peers = ((self.reports[s].needs, done.tokens.get(self.members[s], 0)) for s in accepted)
        return need_of_round(peers)

    def event(
        self, accepted: list[str], done: do.CommitDone, moved: Mapping[str, TrafficDelta], now: float
    ) -> events.RoundCommitted:
        """Describe the durable round to the host; the caller fills in what it knows of the run: `step`,
        `steps`, `counted`, `loss`, `figures`, `fingerprint`."""
        reports = {self.members[s]: self.reports[s] for s in accepted}
        return events.RoundCommitted(
            at=0.0,
            round=self.round,
            step=0,
            steps=0,
            counted=0,
            loss=None,
            tokens=sum(done.tokens.values()),
            members=self.names,
            accepted=tuple(reports),
            fingerprint=0,
            size=done.size,
            packets=dict(done.packets),
            tokens_by_peer=dict(done.tokens),
            compute_s={name: r.compute_s for name, r in reports.items()},
            wait_s={name: r.wait_s for name, r in reports.items()},
            grad_norm={name: r.grad_norm for name, r in reports.items() if r.grad_norm > 0},
            seconds=now - self.opened,
            up={peer: m.up for peer, m in moved.items()},
            down={peer: m.down for peer, m in moved.items()},
            fetched={peer: m.fetched for peer, m in moved.items() if m.fetched},
            deadline=self.deadline - self.opened,
            local_steps=self.local_steps,
        )


def row_of(
    action: do.Commit,
    accepted: tuple[do.Claim, ...],
    loss: float | None,
    tokens: int,
    times: tuple[float, float],
) -> RoundRow:
    """Build the ledger's row of a round that is about to be committed; wall clock of its opening, and now."""
    opened, now = times
    return RoundRow(
        round=action.round,
        step=action.step,
        opened=opened,
        committed=now,
        fingerprint=action.fingerprints.get(action.round, 0),
        members=action.members,
        accepted=tuple(c.peer for c in accepted),
        loss=loss,
        tokens=tokens,
    )


def fitting(sizes: Sequence[int]) -> int:
    """Return the bytes of an aggregate that members can fetch beside their compute: all but a quarter of
    them, so that no single one of many decides; 0: not known."""
    return sorted(sizes)[len(sizes) // 4] if sizes else 0
