"""CocktailSGD (Wang et al., ICML 2023), Algorithms 1 and 2."""

from .adaptive_rate import PacketLimits, adaptive_rate_of, cost_of, encoding_bytes, most_sent
from .aggregator import Aggregator, Log, aggregator_of, unlogged, verify_saved
from .compressor import compressor_of, handoff_compressor, warm_up_codec
from .decoded_updates import RejectedUpdate, WeightedPackets, select_shards
from .global_model import WRAP, DecodedPacket, GlobalModel, Part, ShardUpdate, decode_packet, replay
from .local_vector import LocalModel
from .outer_optimizer import OuterOptimizer, one_machine, outer_optimizer_of
from .robust_mean import FEWEST, HELD, AggregateStep, median_of, norm_of
from .side_stream import SideStream
from .update_windows import ON_GPU, each_window
from .worker import Worker, worker_of
