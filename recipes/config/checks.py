"""From plain values to a `Recipe`, or to all that is wrong with them at once.

Two passes: pydantic checks names, types and ranges, and the cross-checks look at keys together. All that the
first one finds is shown in one attempt.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from recipes.errors import Problem, RecipeError

from .document import Document, Key, bare_keys, sections
from .key_aliases import FOREIGN_KEYS, UNSUPPORTED_KEYS, VALUE_HINTS
from .schema import Dataset, Recipe, Requires

# lr_scheduler_type -> (one of these is needed, these are allowed)
_SCHEDULE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "cosine": (set(), {"num_cycles"}),
    "cosine_with_min_lr": ({"min_lr", "min_lr_rate"}, {"min_lr", "min_lr_rate", "num_cycles"}),
    "warmup_stable_decay": ({"num_decay_steps"}, {"num_decay_steps", "min_lr_ratio", "num_cycles"}),
}


def check(document: Document, problems: list[Problem]) -> Recipe:
    """The recipe, frozen. Errors: RecipeError with `problems` and everything found here."""
    recipe = None
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [*problems, *(_explain(document, detail) for detail in found if _real(detail))]
    if recipe is not None:
        problems = [*problems, *cross_check(document, recipe)]
    if recipe is None or problems:
        raise RecipeError(_once(problems), document.file)
    return recipe


def _real(detail: Any) -> bool:
    """Not "too short" of a list whose only entry is wrong: that is told already."""
    return not (detail["type"] == "too_short" and detail.get("input"))


def _explain(document: Document, detail: Any) -> Problem:
    """A pydantic error in our words."""
    key: Key = tuple(detail["loc"])
    kind, context, given = detail["type"], detail.get("ctx", {}), detail.get("input")
    while key and key not in document.lines and key not in document.overridden and kind != "missing":
        key = key[:-1]  # pydantic adds the branch of a union: ("data_files", "str")
    key = key or tuple(detail["loc"])
    if kind == "extra_forbidden":
        return unknown(document, tuple(detail["loc"]))
    if kind == "missing":
        return document.problem(key, "is required")
    messages = {
        "literal_error": f"must be {context.get('expected')}",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "dict_type": "must be a mapping of keys to values",
        "model_type": "must be a section, a mapping of keys to values",
        "tuple_type": "must be a list",
        "too_short": "needs at least one entry",
        "string_too_short": "must not be empty",
        "greater_than": f"must be above {context.get('gt')}",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than": f"must be below {context.get('lt')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "multiple_of": f"must be a multiple of {context.get('multiple_of')}",
        "finite_number": "must be a finite number",
        "string_pattern_mismatch": "must be lower-case letters, digits, dots and dashes, at most 64",
        "value_error": str(context.get("error", "")),
    }
    message = messages.get(kind, detail["msg"])
    hint = ""
    if isinstance(given, bool) and kind in {"string_type", "literal_error"}:
        hint = "YAML reads yes, no, on and off as true or false; put it in quotes"
    elif isinstance(given, str):
        hint = VALUE_HINTS.get((".".join(map(str, key)), given), "")
    if kind not in {"value_error", "too_short", "string_too_short"} and not isinstance(given, dict | list):
        message += f", not {'null' if given is None else repr(given)}"
    return document.problem(key, message, hint)


def unknown(document: Document, key: Key) -> Problem:
    """An unknown key: what was it meant to be?"""
    name = str(key[-1])
    inside = sections()
    where = inside.get(str(key[0])) if len(key) > 1 else Recipe
    if key[0] in ("datasets", "eval_datasets") and len(key) > 1:
        where = Dataset
    if key[:2] == ("swarm", "requires") and len(key) > 2:
        where = Requires
    known = list(where.model_fields) if where else []
    if name in UNSUPPORTED_KEYS:
        return document.problem(key, UNSUPPORTED_KEYS[name])
    if name in FOREIGN_KEYS:
        hint = "it means the opposite" if name.startswith("train_on_input") else ""
        return document.problem(key, f"cocktail calls this {FOREIGN_KEYS[name]}", hint)
    right = bare_keys().get(name)
    if right is not None and right != key:
        place = f"under `{right[0]}:`" if len(right) > 1 else "at the top level"
        return document.problem(key, f"it belongs {place}")
    if len(key) > 1 and name in Recipe.model_fields:
        return document.problem(key, "it belongs at the top level")
    if len(key) == 1 and name in Dataset.model_fields:
        return document.problem(key, "it belongs under `datasets:`")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        return document.problem(key, f"did you mean `{near[0]}`?")
    elsewhere = difflib.get_close_matches(name, list(bare_keys()), n=1, cutoff=0.8)
    if elsewhere:
        full = ".".join(str(part) for part in bare_keys()[elsewhere[0]])
        return document.problem(key, f"did you mean `{full}`?")
    return document.problem(key, "unknown key", f"known here: {', '.join(known)}" if known else "")


def cross_check(document: Document, recipe: Recipe) -> list[Problem]:
    """What no key shows alone."""
    found: list[Problem] = []

    def wrong(name: str, message: str, hint: str = "") -> None:
        found.append(document.problem(tuple(name.split(".")), message, hint))

    data, training, swarm = recipe.data, recipe.training, recipe.swarm
    if training.global_batch_size < swarm.min_peers:
        wrong(
            "training.global_batch_size",
            f"{training.global_batch_size} samples cannot be shared by swarm.min_peers={swarm.min_peers}",
        )
    if swarm.max_peers is not None and swarm.max_peers < swarm.min_peers:
        wrong("swarm.max_peers", f"{swarm.max_peers} is below swarm.min_peers={swarm.min_peers}")
    found += _check_datasets(document, recipe)
    if data.streaming:
        found += _check_stream(document, recipe)
    if data.val_set_size and recipe.eval_datasets:
        wrong("data.val_set_size", "excluded by eval_datasets: the held-out rows come from one or the other")
    if recipe.checkpoint.eval_steps and not recipe.has_eval:
        wrong("checkpoint.eval_steps", "there is nothing to evaluate on", "data.val_set_size=0.05")
    if training.max_steps == 0 or training.max_steps < -1:
        wrong("training.max_steps", f"must be at least 1, or -1 for whole epochs, not {training.max_steps}")
    found += _check_schedule(document, recipe)
    found += _check_model(document, recipe)
    found += _check_compression(document, recipe)
    return found


def _check_compression(document: Document, recipe: Recipe) -> list[Problem]:
    found: list[Problem] = []
    compression, most = recipe.compression, recipe.training.max_steps

    def wrong(name: str, message: str, hint: str = "") -> None:
        found.append(document.problem(("compression", name), message, hint))

    if compression.preset == "lora-cocktail" and recipe.lora is None:
        wrong("preset", "`lora-cocktail` is for adapters", "add a section `lora:`, or `cocktail`")
    if 0 < most < compression.local_steps:
        said = f"{compression.local_steps}: a run of {most} steps would exchange nothing before its end"
        wrong("local_steps", said, f"local_steps={max(1, most // 10)}")
    if 0 < compression.topk_chunk * compression.topk_ratio < 0.5:
        said = f"topk_ratio {compression.topk_ratio:g} keeps none of {compression.topk_chunk} values"
        wrong("topk_chunk", said, "a larger chunk")
    return found


def _check_datasets(document: Document, recipe: Recipe) -> list[Problem]:
    found = []
    weighted = [dataset.weight is not None for dataset in recipe.datasets]
    for number, has_weight in enumerate(weighted):
        if any(weighted) and not has_weight:
            key: Key = ("datasets", number, "weight")
            found.append(document.problem(key, "is required where another data set has one"))
    for number, dataset in enumerate(recipe.eval_datasets):
        if dataset.weight is not None:
            key = ("eval_datasets", number, "weight")
            found.append(document.problem(key, "means nothing here: all of what is held out is measured"))
    return found


def _check_stream(document: Document, recipe: Recipe) -> list[Problem]:
    """What cannot be had without reading all rows first."""
    data, found = recipe.data, list[Problem]()
    if recipe.training.max_steps == -1:
        found.append(document.problem(("training", "max_steps"), "is required where data.streaming is on"))
    if 0 < data.val_set_size < 1:
        said = "must be a number of rows where data.streaming is on: how many there are is not known"
        found.append(document.problem(("data", "val_set_size"), said))
    if len(recipe.datasets) > 1 and recipe.datasets[0].weight is None:
        said = "is required where several data sets are streamed"
        found.append(document.problem(("datasets", 0, "weight"), said))
    for number, dataset in enumerate(recipe.datasets):
        if "[" in dataset.split:
            key: Key = ("datasets", number, "split")
            found.append(
                document.problem(key, "cannot be a slice where data.streaming is on", "max_samples: 1000")
            )
    if data.dataset_num_proc not in (None, 1):
        found.append(document.problem(("data", "dataset_num_proc"), "a stream is tokenized by one process"))
    if recipe.swarm.probe_batch_size:
        said = "must be 0 where data.streaming is on: the probe draws from all rows"
        found.append(document.problem(("swarm", "probe_batch_size"), said))
    return found


def _check_model(document: Document, recipe: Recipe) -> list[Problem]:
    """What is trained, in which numbers, and where it goes."""
    found: list[Problem] = []
    model, training, checkpoint = recipe.model, recipe.training, recipe.checkpoint

    def wrong(name: str, message: str, hint: str = "") -> None:
        found.append(document.problem(tuple(name.split(".")), message, hint))

    if model.load_in_8bit and model.load_in_4bit:
        wrong("model.load_in_8bit", "8 bit and 4 bit exclude each other")
    if model.quantized and recipe.lora is None:
        bits = "model.load_in_4bit" if model.load_in_4bit else "model.load_in_8bit"
        wrong(bits, "only a frozen base can be quantized", "add a section `lora:`")
    if training.bf16 is True and training.fp16:
        wrong("training.fp16", "excluded by bf16")
    if not training.fp32_master_weights and recipe.lora is not None:
        wrong("training.fp32_master_weights", "adapters are always trained in float32")
    elif not training.fp32_master_weights and model.dtype != "bfloat16":
        message = "only bfloat16 weights are trained without"
        wrong("training.fp32_master_weights", message, "model.dtype=bfloat16")
    if recipe.lora is None and model.dtype == "float16":
        message = "float16 holds no gradients of weights that are trained"
        wrong("model.dtype", message, "model.dtype=bfloat16, or float32 with training.fp16=true")
    if recipe.lora is None and model.dtype == "bfloat16" and training.fp16:
        wrong("training.fp16", "excluded by model.dtype `bfloat16`")
    if checkpoint.push_to_hub and not checkpoint.hub_model_id:
        wrong("checkpoint.push_to_hub", "where to?", "hub_model_id: me/my-model")
    if checkpoint.push_to_hub and checkpoint.hub_strategy != "end" and not checkpoint.save_steps:
        wrong("checkpoint.hub_strategy", f"`{checkpoint.hub_strategy}` needs save_steps")
    return found


def _check_schedule(document: Document, recipe: Recipe) -> list[Problem]:
    key = ("training", "lr_scheduler_kwargs")
    kind, given = recipe.training.lr_scheduler_type, set(recipe.training.lr_scheduler_kwargs)
    needed, allowed = _SCHEDULE_KEYS.get(kind, (set(), set()))
    found = []
    if given - allowed:
        what = ", ".join(sorted(given - allowed))
        may = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none"
        found.append(document.problem(key, f"`{kind}` does not take {what}", may))
    if needed and len(given & needed) != 1:
        found.append(document.problem(key, f"`{kind}` needs one of {', '.join(sorted(needed))}"))
    return found


def _once(problems: list[Problem]) -> list[Problem]:
    """A union reports one mistake once for each branch: keep the first."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for problem in problems:
        if (problem.place, problem.key) not in seen:
            seen.add((problem.place, problem.key))
            kept.append(problem)
    return kept
