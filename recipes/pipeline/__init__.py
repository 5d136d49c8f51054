"""Pipeline stages: a model's layers on several machines."""

from .layer_partition import Costs, parameter_costs, partition_layers
from .layer_shards import cut_at_layers, layer_ends
from .stage_model import ARCHITECTURES, StageModel, architecture_of, layers_of, stage_ranges
from .stage_plan import StageMemory, StagePlan, cut_of, plan_stages, stage_memory
from .stage_schedule import PER_STAGE, StageSchedule, Work
from .stage_worker import BadMessage, Kind, Line, StageMessage, StageWorker
