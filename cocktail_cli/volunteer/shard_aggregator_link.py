"""A peer that aggregates shards: their error feedback, and its links to the other aggregators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.aggregation import DurableShards
from transport import PeerLink
from transport.aggregators import AggregatorThread, PacketSharding, ShardClients, ShardedExchange
from transport.direct import link_to
from transport.protocol import CurveKeys

if TYPE_CHECKING:
    from recipes.config import Recipe


def shard_backend(recipe: Recipe, parameters: int, path: Path, warn: Callable[[str], None]) -> DurableShards:
    """Make the aggregator of this peer's shards, with the error feedback that is stored at `path`."""
    from recipes.algorithm import aggregator_of

    def new() -> DurableShards:
        return DurableShards(aggregator_of(recipe, parameters, assigned=()), path)

    shards = new()
    try:
        shards.recover()
    except ValueError as problem:
        warn(f"the stored error feedback of this peer's shards is damaged and removed: {problem}")
        shards.forget()
        shards.close()
        shards = new()
    return shards


def connect_aggregators(link: PeerLink, keys: CurveKeys) -> ShardClients:
    """Make this peer's connections to the aggregators of its rounds."""
    return ShardClients(partial(link_to, link, keys))


def exchange_by_shard(
    link: PeerLink, shards: int, clients: ShardClients | None, aggregator: AggregatorThread | None
) -> ShardedExchange:
    """Join the exchange of a run whose `shards` shards are aggregated by peers."""
    from recipes.algorithm import merge_packets, select_shards

    return ShardedExchange(link, PacketSharding(shards, select_shards, merge_packets), clients, aggregator)
