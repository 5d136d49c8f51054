"""Peers that own shards of the vector. A run in star mode does not need this package."""

from .aggregator_thread import Owning
from .shard_aggregation import HubShards
from .shard_assignment import digest_of
from .shard_barrier import Ended, Unmoved
from .shard_clients import DIAL_S, PIECE, Direct
from .shard_server import Door

__all__ = [
    "DIAL_S",
    "PIECE",
    "Direct",
    "Door",
    "Ended",
    "HubShards",
    "Owning",
    "Unmoved",
    "digest_of",
]
