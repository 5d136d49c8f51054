"""Peers that own shards of the vector. A run in star mode does not need this package."""

from .aggregator_thread import AggregatorThread
from .shard_aggregation import HubShards
from .shard_assignment import digest_of
from .shard_barrier import Ended, Unmoved
from .shard_clients import DIAL_S, DIRECT_FRAGMENT, ShardClients
from .shard_server import ShardServer

__all__ = [
    "DIAL_S",
    "DIRECT_FRAGMENT",
    "AggregatorThread",
    "Ended",
    "HubShards",
    "ShardClients",
    "ShardServer",
    "Unmoved",
    "digest_of",
]
