"""Aggregators: peers that others can reach sum the shards of an update, in place of the hub."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cocktail_cli.assembly import Extension, HostParts, PeerExtension, PeerParts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from recipes.config import Recipe
    from transport import Ledger
    from transport.hub import Extend, HubParts

    from .aggregator_thread import AggregatorThread
    from .durable_shards import HubAggregator
    from .hub import ShardCoordinator
    from .residual_handoffs import HandoffStore

NAME = "aggregators"  # of its section, its bodies and its note in a ledger


class Aggregators(Extension):
    """The hub assigns shards to peers, and joins a round's packet from theirs."""

    def files_in_use(self, ledger: Ledger) -> Mapping[Path, bool]:
        if not ledger.noted(NAME):
            return {}
        from .residual_handoffs import HandoffStore

        store = HandoffStore(ledger)
        damaged = store.damaged()
        return {path: path not in damaged for path in {*store.folder.glob("*"), *damaged}}

    def hub(self, host: HostParts) -> Extend | None:
        if self.hub_sums(host.recipe):
            return None
        from .durable_shards import HubAggregator, longest_errors
        from .residual_handoffs import HandoffStore

        recipe, work = host.recipe, host.work
        store = HandoffStore(host.ledger)
        shards = HubAggregator(work.durable, store)
        largest = longest_errors(recipe.compression, work.parameters)
        return partial(begin, store, shards, recipe.compression.shard_count, largest)

    def peer(self, peer: PeerParts) -> PeerExtension | None:
        if self.hub_sums(peer.recipe):
            return None
        from cocktail_cli.machine import own_keys
        from transport.direct import link_to

        from .peer import ShardClients, ShardedPeer

        clients = ShardClients(partial(link_to, peer.link, own_keys()))
        own = partial(aggregator_of, peer) if peer.server is not None else None
        return ShardedPeer(peer.link, peer.recipe.compression.shard_count, clients, own)

    def dialled(self, recipe: Recipe) -> bool:
        return not self.hub_sums(recipe)

    def hub_sums(self, recipe: Recipe) -> bool:
        """Tell whether the hub of a run aggregates alone."""
        return recipe.extensions[NAME].hub_sums


def begin(
    store: HandoffStore, work: HubAggregator, shards: int, largest: int, hub: HubParts
) -> ShardCoordinator:
    """Begin the hub's part, with the handoffs that wait in its ledger."""
    from .hub import ShardCoordinator

    for lost in store.drop_damaged():
        hub.out.warn(lost)
    return ShardCoordinator(hub, store, work, shards, largest)


def aggregator_of(peer: PeerParts, parameters: int) -> AggregatorThread:
    """Make the aggregator of a peer that others can reach, with the error feedback that it has stored."""
    from cocktail_cli.volunteer import path_of
    from transport.protocol import short_key

    from .aggregator_thread import AggregatorThread
    from .durable_shards import longest_errors, shard_backend

    assert peer.server is not None, "an aggregator has a server"
    name = peer.link.name
    # another run of this name has a hub with another key
    path = path_of(peer.url.run, name).with_name(f"{name}@{short_key(peer.url.key)}")
    backend = shard_backend(peer.recipe, parameters, path, peer.warn)
    largest = longest_errors(peer.recipe.compression, parameters)
    return AggregatorThread(peer.link, backend, largest, peer.server, peer.warn)


extension = Aggregators()
