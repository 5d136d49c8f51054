"""The hub's half: updates weigh as many samples as their peers report, within bounds.

Leases are shares of the global batch by measured pace. A peer's loop has batches of its own size, so its
report says how many samples its gradient is of; that is its weight, at most `MOST` times the middle one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median_low

from transport.hub import HubParts
from transport.protocol import WeightedPacket
from transport.scheduling import Exchange, HubExtension, Sums

MOST = 4.0  # times the middle one: the most that a claim weighs


@dataclass
class WeighedClaims(HubExtension):
    """Weighs the updates of a round by the samples that their peers claim."""

    hub: HubParts
    samples: dict[str, float] = field(default_factory=dict)  # of the closed round, by peer

    def closes(self, ex: Exchange) -> None:
        claims = {ex.members[session]: sum(ex.reports[session].figures) for session in ex.claims}
        found = {peer: claim for peer, claim in claims.items() if isfinite(claim) and claim > 0}
        most = MOST * median_low(found.values()) if found else 0.0
        self.samples = {peer: min(claim, most) for peer, claim in found.items()}

    def sums(self, inner: Sums) -> Sums:
        def aggregate(round: int, updates: Sequence[WeightedPacket]) -> bytes:
            weighed = [one._replace(weight=self.samples.get(one.peer, one.weight)) for one in updates]
            return inner.aggregate(round, weighed)

        return inner._replace(aggregate=aggregate)
