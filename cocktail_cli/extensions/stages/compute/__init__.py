"""A peer that is several machines, each with consecutive layers (pipeline stages), as all of them compute."""

from .activation_codec import (
    ActivationDecoder,
    ActivationEncoder,
    ActivationMemory,
    MemoryMismatch,
    Rows,
    decode_gradient,
    encode_gradient,
)
from .ring_ends import RingHead, StageServer
from .ring_request import StageFailed, StageFull, StageLost
from .stage_machine import CONFIG, StageMachine, StagePart, check_staged, open_weights
from .stage_model import ARCHITECTURES, StageModel, architecture_of, layers_of, stage_ranges
from .stage_plan import (
    Costs,
    StageMemory,
    StagePlan,
    cut_at_layers,
    cut_of,
    layer_ends,
    parameter_costs,
    partition_layers,
    plan_stages,
)
from .stage_worker import PER_STAGE, BadMessage, Line, StageSchedule, StageWorker, Work
from .staged_peer import StagedWorker, build_staged_peer, load_replica, mend
