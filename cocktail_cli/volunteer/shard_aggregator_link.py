"""A peer as an owner of shards: its errors, its door, and its ways to the doors of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.aggregation import DurableShards
from transport import PeerLink, RunURL
from transport.aggregators import (
    DIAL_S,
    DIRECT_FRAGMENT,
    AggregatorThread,
    PacketSharding,
    ShardClients,
    ShardedExchange,
    ShardServer,
)
from transport.peer import LinkLimits, PeerIdentity
from transport.protocol import AggregatorInfo, CurveKeys, parse_address
from transport.wire import RouterWire

if TYPE_CHECKING:
    from recipes.config import Recipe


def half_of(recipe: Recipe, parameters: int, path: Path, told: Callable[[str], None]) -> DurableShards:
    """The errors of the shards that this peer owns: as they are kept at `path`, where it was killed."""
    from recipes.algorithm import aggregator_of

    equal = recipe.compression.weighting == "uniform"

    def new() -> DurableShards:
        return DurableShards(aggregator_of(recipe, parameters, assigned=()), path, equal=equal)

    kept = new()
    try:
        kept.recover()
    except ValueError as problem:
        told(f"the errors of its shards that this peer kept are damaged and removed: {problem}")
        kept.forget()
        kept.close()
        kept = new()
    return kept


def open_door(host: str, port: int, keys: CurveKeys, url: RunURL) -> tuple[ShardServer, int]:
    """The door at which the other members reach this peer, and its port. It opens to the hub, and to members
    once a round says who they are. Raises AddressInUse.
    """

    def knows(key: str) -> bool:
        return key == url.key or door.knows(key)

    wire = RouterWire(host, port, keys, allowed=knows)
    door = ShardServer(wire, url.run)
    door.start()
    return door, wire.port


def to_owners(link: PeerLink, keys: CurveKeys) -> ShardClients:
    """Make this peer's connections to the aggregators of its rounds, under its own name and keys."""

    def dial(owner: AggregatorInfo) -> PeerLink:
        host, port = parse_address(owner.address)
        url = RunURL(owner.key, "", host, port, link.url.run)
        return PeerLink(
            url,
            PeerIdentity(link.name, keys=keys),
            LinkLimits(patience=DIAL_S, flows=1, min_fragment=DIRECT_FRAGMENT),
            rate_limits=link.rate_limits,
        )

    return ShardClients(dial)


def exchange_by_shard(
    link: PeerLink, shards: int, clients: ShardClients | None, aggregator: AggregatorThread | None
) -> ShardedExchange:
    """Join the exchange of a run whose `shards` shards are aggregated by peers."""
    from recipes.algorithm import merge_packets, select_shards

    return ShardedExchange(link, PacketSharding(shards, select_shards, merge_packets), clients, aggregator)
