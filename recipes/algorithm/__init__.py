"""CocktailSGD (Wang et al., ICML 2023), Algorithms 1 and 2."""

from .adaptive_rate import adaptive_rate_of
from .cocktail_sgd import (
    DecodedPacket,
    GlobalModel,
    ShardUpdate,
    Worker,
    compressor_of,
    fold,
    read,
    rehearse,
)
from .decoded_updates import RejectedUpdate, length
from .robust_mean import FEWEST, HELD, AggregateStep, median_of
from .shard_aggregator import (
    Aggregator,
    aggregator_of,
    equal_weights,
    merge_packets,
    newest_given,
    select_shards,
    shards_in,
)

__all__ = [
    "FEWEST",
    "HELD",
    "AggregateStep",
    "Aggregator",
    "DecodedPacket",
    "GlobalModel",
    "RejectedUpdate",
    "ShardUpdate",
    "Worker",
    "adaptive_rate_of",
    "aggregator_of",
    "compressor_of",
    "equal_weights",
    "fold",
    "length",
    "median_of",
    "merge_packets",
    "newest_given",
    "read",
    "rehearse",
    "select_shards",
    "shards_in",
]
