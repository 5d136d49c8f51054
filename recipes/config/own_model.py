"""Names of recipes and of what they train on: the neutral recipe, `finetune`, and what is told to others."""

from __future__ import annotations

import re
from pathlib import Path

from .schema import Recipe

NEUTRAL = "finetune"
LONGEST_NAME = 64  # letters of a recipe's name


def is_repository_id(path: str) -> bool:
    """Match owner/name, unless such a file or folder exists here."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", path)) and not Path(path).exists()


def public_name(path: str) -> str:
    """Return a hub id unchanged, and the last part of a local path."""
    if is_repository_id(path) or path.startswith(("builtin:", "https://")):
        return path
    return Path(path).name or Path(path).expanduser().resolve().name or path


def run_name(model: str, data: str) -> str:
    """Make a recipe's name of a model and data: `qwen3-0.6b-my` of Qwen/Qwen3-0.6B and my.jsonl."""
    words = [re.split("[/:]", public_name(path))[-1] for path in (model, data)]
    words[1] = re.sub(r"\.(jsonl|json|csv|tsv|parquet|txt)(\.gz)?$", "", words[1])
    slug = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip(".-")
    return slug[:LONGEST_NAME].rstrip(".-") or NEUTRAL


def describe(model: str, data: str) -> str:
    """Describe a run by its model and data, without local paths."""
    return f"{public_name(model)} fine-tuned on {public_name(data)}."


def method_of(recipe: Recipe) -> str:
    """Name the training method."""
    if recipe.lora is None:
        return "Full fine-tune"
    method = recipe.objective.method
    return f"LoRA adapters, by {method}," if method else "LoRA adapters"


def published_recipe(recipe: Recipe) -> dict[str, object]:
    """Dump the keys that the recipe sets, local files by their names alone."""
    values: dict[str, object] = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"checkpoint"})
    values["version"] = recipe.version
    model = recipe.model.model_dump(mode="json", exclude_defaults=True)
    for key in ("model_name_or_path", "tokenizer_name_or_path"):
        if model.get(key):
            model[key] = public_name(model[key])
    values["model"] = model
    for key, datasets in (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets)):
        kept = [dataset.model_dump(mode="json", exclude_defaults=True) for dataset in datasets]
        if kept:
            values[key] = [
                one | {"path": public_name(dataset.path)} for one, dataset in zip(kept, datasets, strict=True)
            ]
    return values
