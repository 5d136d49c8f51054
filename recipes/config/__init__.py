"""Recipes: schema, presets, loading, checks. Needs pydantic and YAML only."""

from .checks import foreign_keys
from .document import Extend, extension_sections
from .key_names import is_switch, key_names, known_key
from .loader import Resolved, list_recipes, load_recipe, load_resolved, recipe_from_json, source_of
from .locations import DATA_SUFFIXES, data_suffix, is_hub_id, looks_like_data_file, looks_like_path
from .own_model import NEUTRAL, describe, is_repository_id, method_of, public_name, published_recipe
from .presets import PRESETS
from .schema import (
    Compression,
    Conflict,
    Data,
    Dataset,
    ExtensionSection,
    Lora,
    Model,
    ObjectiveSection,
    Real,
    Recipe,
    Training,
    Whole,
    key,
    parse_duration,
    parse_size,
)
from .schema_reference import describe_keys, json_schema
