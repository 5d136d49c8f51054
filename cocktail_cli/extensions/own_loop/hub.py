"""The hub's half: a round closes by the samples that its peers report, and weighs by them, within bounds.

Leases are shares of the global batch by measured pace. A peer's loop has batches of its own size, so its
report says how many samples its gradient is of; that is its weight, at most `MOST` times the middle one. Once
the reported samples are a global batch the round closes. Who is left out delivers in a later round, and after
`LEFT_OUT` times a round waits as any does: no peer is left out for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median_low

from transport.hub import HubParts
from transport.membership import Session
from transport.protocol import WeightedPacket
from transport.scheduling import Exchange, HubExtension, Sums

MOST = 4.0  # times the middle one: the most that a claim weighs
LEFT_OUT = 2  # rounds in a row that go on without a peer as others report enough


@dataclass
class WeighedClaims(HubExtension):
    """Weighs the updates of a round by the samples that their peers claim."""

    hub: HubParts
    samples: dict[str, float] = field(default_factory=dict)  # of the closed round, by peer
    usual: dict[str, float] = field(default_factory=dict)  # the newest claim of each session
    left_out: Counter[str] = field(default_factory=Counter)  # rounds in a row without it, by session

    def enough(self, ex: Exchange) -> bool:
        found = claims_of(ex)
        known = [one for session in ex.members if (one := found.get(session) or self.usual.get(session))]
        most, target = bound(known), self.hub.settings.global_batch * ex.local_steps
        waits = any(self.left_out[session] >= LEFT_OUT for session in ex.members.keys() - ex.claims.keys())
        return not waits and sum(min(one, most) for one in found.values()) >= target

    def closes(self, ex: Exchange) -> None:
        found = claims_of(ex)
        self.usual |= found
        self.left_out.update(ex.members.keys() - ex.claims.keys())
        for session in ex.claims:
            self.left_out.pop(session, None)
        most = bound(found.values())
        self.samples = {ex.members[session]: min(claim, most) for session, claim in found.items()}

    def session_ended(self, session: Session) -> None:
        self.usual.pop(session.id, None)
        self.left_out.pop(session.id, None)

    def sums(self, inner: Sums) -> Sums:
        def aggregate(round: int, updates: Sequence[WeightedPacket]) -> bytes:
            weighed = [one._replace(weight=self.samples.get(one.peer, one.weight)) for one in updates]
            return inner.aggregate(round, weighed)

        return inner._replace(aggregate=aggregate)


def claims_of(ex: Exchange) -> dict[str, float]:
    """Return the samples that the updates of a round are of, as their sessions say."""
    claims = {session: sum(ex.reports[session].figures) for session in ex.claims}
    return {session: claim for session, claim in claims.items() if isfinite(claim) and claim > 0}


def bound(claims: Collection[float]) -> float:
    """Return the most that one of these claims counts for."""
    return MOST * median_low(claims) if claims else 0.0
