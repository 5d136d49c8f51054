"""Plan memory, bytes and seconds of a run from the model's config alone, and check a recipe's model and
data."""

from .memory_plan import Machine, MemoryPart, MemoryPlan, count_text, plan_memory
from .method_choice import MethodChoice, choose_method
from .recipe_validation import examine, unusual_settings
from .step_cost import (
    HUBS_DOWN,
    HUBS_UP,
    DataSurvey,
    LinkSpeed,
    StepCost,
    cost_of_step,
    packet_bytes,
    survey_data,
)
