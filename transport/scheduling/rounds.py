"""The life of a round, and the table of a run's phases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from transport import actions as do
from transport.ledger import RoundRow
from transport.protocol import AggregatorInfo, Close, HandoffOffer, Report, Round, events

from .evaluation import Evaluation
from .leases import Leases


class Phase(Enum):
    WAITING = "waiting"  # fewer than min_peers are ready, or those who hold the last work are not
    OPENING = "opening"  # leases are being written to the ledger
    OPEN = "open"  # members compute and upload
    CLOSED = "closed"  # being aggregated and made durable
    FINAL = "final"  # every sample is counted; the last evaluation
    ENDED = "ended"


# which phase may follow which; anything else is our bug
PHASES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.OPENING, Phase.FINAL, Phase.ENDED}),
    Phase.OPENING: frozenset({Phase.OPEN, Phase.WAITING, Phase.ENDED}),
    Phase.OPEN: frozenset({Phase.CLOSED, Phase.WAITING, Phase.ENDED}),
    Phase.CLOSED: frozenset({Phase.WAITING, Phase.ENDED}),
    Phase.FINAL: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


@dataclass
class Exchange:
    """The round in progress. Keyed by session: a peer that comes back anew is another one."""

    round: int
    step: int
    members: dict[str, str]  # session -> name, as it was opened
    leased: int  # samples
    opened: float  # a hub that was suspended moves it on
    deadline: float  # moves with each update that comes
    reports: dict[str, Report] = field(default_factory=dict)
    uploads: set[str] = field(default_factory=set)  # sessions whose packet is here, whole
    claims: dict[str, list[int]] = field(
        default_factory=dict
    )  # session -> rounds its arrived update delivers
    arrived: dict[str, float] = field(default_factory=dict)  # session -> seconds after the opening
    keys: dict[str, str] = field(default_factory=dict)  # name -> key
    warned: bool = False  # that the deadline has passed
    looked: tuple[int, int] = (0, 0)  # updates here and missing, when it was last seen whom to wait for
    look_at: float = 0.0  # when to see again, if any are missing: it takes a time of each member
    news: bool = False  # that has changed since
    spans: dict[str, int] = field(default_factory=dict)  # session -> rounds its lease is to last, above 1
    fits: int = 0  # bytes of an aggregate that all members can fetch beside their compute; 0: not known
    owners: dict[str, list[int]] = field(default_factory=dict)  # session -> its shards
    hubs: tuple[int, ...] = (0,)  # the shards of the hub
    estates: list[HandoffOffer] = field(default_factory=list)  # what the hub is to add to its errors
    # (owner, member) -> digest of what this one sends that one
    held: dict[tuple[str, str], str] = field(default_factory=dict)  # at the owner, by its word
    passed: dict[tuple[str, str], str] = field(default_factory=dict)  # here, to be fetched
    lost: set[str] = field(
        default_factory=set
    )  # owners that are gone, or silent: nothing is expected of them
    closes: dict[str, Close] = field(default_factory=dict)  # what each owner was told last

    def is_cut_for_us(self, report: Report) -> bool:
        """Not for owners of the round as a hub that was killed had opened it: its member cuts again."""
        return report.parts.keys() <= {self.members[owner] for owner in self.owners}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.members.values()))

    def message(self, session: str, steps: int, samples: int, ev: Evaluation | None) -> Round:
        """What a member is told: its lease, and its part where this round evaluates."""
        part = ev.part_of(session) if ev is not None and ev.round == self.round else None
        parts = ev.parts if ev is not None and part is not None else 0
        spans = self.spans.get(session, 1)
        said = Round(self.round, self.step, steps, list(self.names), samples, True, part or 0, parts)
        return replace(said, spans=spans, fits=self.fits)

    def whole(self, session: str) -> bool:
        """Is all here that this member sends? What an owner sends itself it has."""
        others = self.owners.keys() - self.lost - {session}
        return (not self.hubs or session in self.uploads) and all(self.there(o, session) for o in others)

    def there(self, owner: str, member: str) -> bool:
        """Can the owner have the part that this member has reported?"""
        said, pair = self.reports[member].parts.get(self.members[owner], ""), (owner, member)
        return said in (self.held.get(pair), self.passed.get(pair))

    def parts_for(self, owner: str, peers: Iterable[str]) -> dict[str, str]:
        """Peer -> the digest of what it has for this owner."""
        said = {self.members[s]: self.reports[s].parts for s in self.claims}
        return {peer: said[peer].get(self.members[owner], "") for peer in peers}

    def commit(self, leases: Leases) -> do.Commit:
        """What has arrived, to be aggregated and made durable."""
        claims = tuple(
            do.Claim(
                peer=self.members[s],
                session=s,
                leases={r: leases.ids(s, r) or () for r in self.claims[s]},
                loss_sum=self.reports[s].loss_sum,
                tokens=self.reports[s].tokens,
            )
            for s in self.by_name
        )
        fingerprint = self.reports[self.by_name[0]].fingerprint
        there = self.owners.keys() - self.lost
        owners = {s: AggregatorInfo(self.members[s], self.owners[s]) for s in self.owners if s in there}
        left = tuple(self.estates)
        return do.Commit(self.round, self.step, self.names, claims, fingerprint, self.hubs, owners, left)

    def told(self, accepted: list[str], done: do.CommitDone, now: float) -> events.RoundCommitted:
        """What the hub's owner is told when it is durable; the run's own figures are to be filled in."""
        reports = {self.members[s]: self.reports[s] for s in accepted}
        tokens = sum(r.tokens for r in reports.values())
        return events.RoundCommitted(
            at=0.0,
            round=self.round,
            step=0,
            steps=0,
            counted=0,
            loss=sum(r.loss_sum for r in reports.values()) / tokens if tokens else None,
            tokens=sum(done.tokens.values()),
            members=self.names,
            accepted=tuple(reports),
            fingerprint=self.reports[accepted[0]].fingerprint,
            size=done.size,
            packets=dict(done.packets),
            tokens_by_peer=dict(done.tokens),
            compute_s={name: r.compute_s for name, r in reports.items()},
            wait_s={name: r.wait_s for name, r in reports.items()},
            seconds=now - self.opened,
            deadline=self.deadline - self.opened,
        )

    @property
    def by_name(self) -> list[str]:
        """Sessions with an update, by name, never by arrival: float sums depend on order."""
        return sorted(self.claims, key=lambda session: self.members[session])


def row_of(
    action: do.Commit, accepted: tuple[do.Claim, ...], tokens: int, opened: float, now: float
) -> RoundRow:
    """What the ledger is to keep of a round that is about to be committed. Times by the wall clock."""
    said = sum(c.tokens for c in accepted)
    return RoundRow(
        round=action.round,
        step=action.step,
        opened=opened,
        committed=now,
        fingerprint=action.fingerprint,
        members=action.members,
        accepted=tuple(c.peer for c in accepted),
        loss=sum(c.loss_sum for c in accepted) / said if said else None,
        tokens=tokens,
    )


def owner_called(ex: Exchange, name: str) -> str | None:
    """The session of an owner from whom something is expected."""
    return next((s for s in ex.owners if ex.members[s] == name and s not in ex.lost), None)
