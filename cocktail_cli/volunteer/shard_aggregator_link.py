"""A peer that other peers reach: its server, the shards that it aggregates, files that it passes on, and its
links to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.aggregation import DurableShards
from transport import PeerLink, RunURL
from transport.aggregators import (
    DIAL_S,
    DIRECT_FRAGMENT,
    AggregatorThread,
    PacketSharding,
    ReachablePeer,
    ShardClients,
    ShardedExchange,
    ShardServer,
)
from transport.passing import FileSources, PacketSources
from transport.peer import LinkLimits, PeerIdentity
from transport.protocol import CurveKeys, parse_address
from transport.wire import RouterWire

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


def open_shard_server(host: str, port: int, keys: CurveKeys, url: RunURL) -> tuple[ShardServer, int]:
    """Open a server for the hub and members of announced rounds; return its port too. Raises AddressInUse."""

    def knows(key: str) -> bool:
        return key == url.key or server.knows(key)

    wire = RouterWire(host, port, keys, allowed=knows)
    server = ShardServer(wire, url.run)
    server.start()
    return server, wire.port


def connect_aggregators(link: PeerLink, keys: CurveKeys) -> ShardClients:
    """Make this peer's connections to the aggregators of its rounds."""
    return ShardClients(partial(link_to, link, keys))


def connect_sources(link: PeerLink, keys: CurveKeys, server: ShardServer | None) -> PacketSources:
    """Take packets from the peers that pass them on; `server` passes on what the hub asks this peer to."""
    return PacketSources(link, partial(link_to, link, keys), server)


def serve_files(link: PeerLink, server: ShardServer, files: Mapping[str, Path]) -> None:
    """Let newcomers that the hub names fetch these objects of the run, while no update is on its way."""
    server.files, server.busy = files, lambda: link.uploads_now
    link.admit_newcomers(server.admit)


def connect_file_sources(link: PeerLink, keys: CurveKeys) -> FileSources:
    """Fetch files from peers that have them, beside the hub."""
    return FileSources(link, partial(link_to, link, keys))


def link_to(link: PeerLink, keys: CurveKeys, peer: ReachablePeer) -> PeerLink:
    """Make a link to a peer, not connected yet, under the name that this one has at the hub."""
    host, port = parse_address(peer.address)
    url = RunURL(peer.key, "", host, port, link.url.run, proxies=link.url.proxies)
    return PeerLink(
        url,
        PeerIdentity(link.name, keys=keys),
        LinkLimits(patience=DIAL_S, flows=1, min_fragment=DIRECT_FRAGMENT),
        rate_limits=link.rate_limits,
    )


def exchange_by_shard(
    link: PeerLink, shards: int, clients: ShardClients | None, aggregator: AggregatorThread | None
) -> ShardedExchange:
    """Join the exchange of a run whose `shards` shards are aggregated by peers."""
    from recipes.algorithm import merge_packets, select_shards

    return ShardedExchange(link, PacketSharding(shards, select_shards, merge_packets), clients, aggregator)
