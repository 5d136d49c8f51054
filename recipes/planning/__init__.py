"""What a run will cost in memory, bytes and seconds, from the model's config alone."""

from .memory_plan import Machine, MemoryPlan, plan_memory
from .recipe_validation import examine
from .step_cost import (
    LinkSpeed,
    StepCost,
    compute_seconds,
    cost_of_step,
    packet_bytes,
    samples_per_peer,
    survey_data,
    topk_within,
)

__all__ = [
    "LinkSpeed",
    "Machine",
    "MemoryPlan",
    "StepCost",
    "compute_seconds",
    "cost_of_step",
    "examine",
    "packet_bytes",
    "plan_memory",
    "samples_per_peer",
    "survey_data",
    "topk_within",
]
