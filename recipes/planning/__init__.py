"""What a run will cost in memory, bytes and seconds, from the model's config alone."""

from .memory_plan import Machine, Memory, memory_of
from .recipe_validation import examine
from .step_cost import (
    Line,
    Step,
    compute_seconds,
    packet_of,
    share_of,
    step_of,
    survey,
    topk_for,
)

__all__ = [
    "Line",
    "Machine",
    "Memory",
    "Step",
    "compute_seconds",
    "examine",
    "memory_of",
    "packet_of",
    "share_of",
    "step_of",
    "survey",
    "topk_for",
]
