"""One peer's training: gradient, optimizer, exchange, checkpoint."""

from . import peer_checkpoint
from .gradient_noise import (
    NOISE_VALUES,
    GradientNoise,
    NoiseSums,
    compared_in,
    parameters_of_places,
    positions_of,
    positions_within,
)
from .loop import build_peer, finetune, foreign_packet, in_order, leased, peer_of, shrink_to_fit
from .micro_batch import (
    LEAVE,
    MOST,
    ON_CPU,
    first_line,
    is_full,
    micro_batch_for,
    share_taken,
    sizes_of,
)
from .optimizers import (
    LINEAR,
    SCRATCH,
    build_optimizer,
    embeddings_of,
    learning_rate,
    mask_momentum,
    optimizer_bytes,
    step_flops,
)
from .peer_checkpoint import read, restore, restore_residual
from .trainer import (
    GRADIENT_CHUNK,
    LOCAL,
    NOISE,
    OPTIMIZER,
    PLAIN,
    RANK,
    FlatParameters,
    Lazy,
    LossScale,
    SingleDeviceTrainer,
    backward,
    clip,
    load_state,
    load_states,
    observed,
    packed,
    parameters_of,
    parsed,
    set_learning_rate,
    states_of,
)
from .types import (
    CaughtUp,
    Delivery,
    EvaluatedPart,
    Event,
    HandedOver,
    Interrupted,
    Lease,
    Link,
    Lowered,
    ModelExtension,
    NotHandedOver,
    Peer,
    Round,
    StepDone,
)
