"""For the process that forks: what transformers and PyTorch keep once a model was traced and loaded."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from recipes.config import load_recipe
from recipes.models import BUILTIN_MODELS
from recipes.planning import Machine, plan_memory

plan_memory(load_recipe("smoke"), BUILTIN_MODELS["builtin:tiny-gpt-neox"], 1, Machine(1 << 40))
get_checkpoint_conversion_mapping("gpt_neox")
