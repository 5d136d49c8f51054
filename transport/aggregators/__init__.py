"""Peers that aggregate shards of the global model. A run in star mode does not load this package."""

from .aggregator_thread import AggregatorThread
from .shard_aggregation import ShardAggregation
from .shard_assignment import digest_of
from .shard_clients import ShardClients
from .shard_coordinator import ShardCoordinator
from .shard_server import ShardServer
from .sharded_exchange import PacketSharding, ShardedExchange
