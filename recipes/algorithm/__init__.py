"""CocktailSGD (Wang et al., ICML 2023), Algorithms 1 and 2."""

from .aggregator import Aggregator, Log, aggregator_of, unlogged
from .compressor import (
    PacketLimits,
    adaptive_rate_of,
    compressor_of,
    cost_of,
    encoding_bytes,
    handoff_compressor,
    most_sent,
    warm_up_codec,
)
from .global_model import (
    ON_GPU,
    WRAP,
    DecodedPacket,
    GlobalModel,
    Part,
    ShardUpdate,
    SideStream,
    each_window,
    replay,
)
from .robust_mean import (
    FEWEST,
    HELD,
    AggregateStep,
    OuterOptimizer,
    RejectedUpdate,
    WeightedPackets,
    median_of,
    one_machine,
    outer_optimizer_of,
    select_shards,
)
from .worker import LocalModel, Worker, worker_of
