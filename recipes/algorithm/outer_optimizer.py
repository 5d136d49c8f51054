"""The outer optimizer: the step that an aggregator takes along the mean of a round's updates.

u = rate sum_i w_i C[d_i];  v <- momentum v + u;  D = u + momentum v + e;  e <- D - C[D]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from recipes.config import Compression

MOST = 8  # packets that are added up; of more it is so many times their mean (LOG.md)


@dataclass(frozen=True)
class OuterOptimizer:
    """The default leaves the mean as it is: D = mean + e."""

    rate: float | Literal["packets"] = 1.0  # packets: their number, up to MOST
    momentum: float = 0.0  # Nesterov's, in the form of torch.optim.SGD

    def rate_of(self, packets: int) -> float:
        """Return the learning rate of a round with so many packets."""
        return float(min(packets, MOST)) if self.rate == "packets" else self.rate

    def peers_share(self, members: int) -> float:
        """Return the share that each peer's optimizer takes of the swarm's learning rate and `adam_beta1`.

        Where the rate is the number of packets it is one over that of the members. So a swarm's step is as
        long whoever comes and goes, and one peer alone trains as if there were no swarm. What others do comes
        late, which is a momentum of its own (Mitliagkas et al., "Asynchrony begets momentum", 2016): the more
        of it there is, the less is to be added.
        """
        return 1 / self.rate_of(members) if self.rate == "packets" else 1.0

    def handoff_weight(self, share: float, packets: int) -> float:
        """Weigh a handoff by a peer whose packets had this share of the mean. A share of 1 is an aggregator's
        e, or of a peer that was alone: both are in steps of the swarm."""
        return share * self.rate_of(packets) if self.rate == "packets" and share < 1 else share

    def step(self, u: Tensor, v: Tensor) -> Tensor:
        """Return u + momentum v, where v, changed in place, has taken u in; u has the rate in it already. All
        are (m,); each product and sum is rounded alone, so that a replay has the same bits."""
        v.mul_(self.momentum).add_(u)
        return (v * self.momentum).add_(u)


PLAIN = OuterOptimizer()


def outer_optimizer_of(compression: Compression) -> OuterOptimizer:
    """Build the outer optimizer that a recipe's `compression` section describes."""
    return OuterOptimizer(compression.outer_learning_rate, compression.outer_momentum)


def one_machine(compression: Compression) -> bool:
    """Are the peers to make the steps of one machine on all samples, at its learning rate?

    They are where packets are added up, and where whole steps are averaged one by one, as by all-reduce. With
    any other rate of the aggregator's the method is a published one, whose peers' optimizers work for
    themselves.
    """
    whole = compression.random_ratio == compression.topk_ratio == compression.local_steps == 1
    mean = compression.outer_learning_rate == 1 and not compression.outer_momentum
    return compression.outer_learning_rate == "packets" or (
        whole and mean and not compression.uncompressed_steps
    )
