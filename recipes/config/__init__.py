"""Recipes: schema, presets, loading, checks. Needs pydantic and YAML only."""

from .document import extension_sections, is_switch, key_names, known_key
from .loader import (
    DATA_SUFFIXES,
    NEUTRAL,
    Resolved,
    data_suffix,
    describe,
    describe_keys,
    foreign_keys,
    is_hub_id,
    is_repository_id,
    json_schema,
    list_recipes,
    load_recipe,
    load_resolved,
    looks_like_path,
    method_of,
    public_name,
    published_recipe,
    recipe_from_json,
    source_of,
)
from .presets import CHOSEN, PRESETS
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
