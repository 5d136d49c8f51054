"""Aggregators whose error feedback survives a crash."""

from .durable_aggregator import KeptOwner
from .durable_shards import KeptShards

__all__ = [
    "KeptOwner",
    "KeptShards",
]
