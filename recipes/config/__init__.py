"""Recipes: schema, presets, loading, checks. Needs pydantic and YAML only."""

from .loader import (
    Resolved,
    list_recipes,
    load_recipe,
    load_resolved,
    recipe_from_json,
    source_of,
)
from .locations import LOADERS, looks_local, looks_local_data, on_hub
from .presets import PLAIN, Outer, outer_of
from .schema import (
    Compression,
    Data,
    Dataset,
    Logging,
    Lora,
    Model,
    Recipe,
    Training,
    duration,
    size,
)
from .schema_reference import json_schema, rows

__all__ = [
    "LOADERS",
    "PLAIN",
    "Compression",
    "Data",
    "Dataset",
    "Logging",
    "Lora",
    "Model",
    "Outer",
    "Recipe",
    "Resolved",
    "Training",
    "duration",
    "json_schema",
    "list_recipes",
    "load_recipe",
    "load_resolved",
    "looks_local",
    "looks_local_data",
    "on_hub",
    "outer_of",
    "recipe_from_json",
    "rows",
    "size",
    "source_of",
]
