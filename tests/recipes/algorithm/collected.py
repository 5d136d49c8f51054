"""Line 3 of Algorithm 2 for the packets of a vector of one shard."""

from torch import Tensor

from recipes.algorithm import AggregateStep, WeightedPackets
from recipes.algorithm.robust_mean import DecodedUpdates, Rule, collect


def collected(
    error: Tensor, packets: WeightedPackets, rule: Rule, decoded: DecodedUpdates | None = None
) -> AggregateStep:
    """Weigh packets, of which some may be decoded already, and collect them onto e."""
    decoded = decoded or DecodedUpdates({0: len(error)})
    return collect(error, decoded.weigh(packets)[0], rule)
