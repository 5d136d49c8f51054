"""Check a recipe's plain values: a `Recipe`, or everything that is wrong with them at once. Describe its
keys.

Two passes: pydantic checks names, types and ranges, then the cross-checks look at keys together. The type,
the default and the meaning of each key are read from the schema.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from recipes.errors import Problem, RecipeError

from .document import (
    Document,
    Extend,
    Key,
    bare_keys,
    extension_sections,
    heart_alone,
    sections,
)
from .schema import ROW_TYPES, Compression, Conflict, Dataset, Recipe, Requires, Section

# lr_scheduler_type -> (one of these is needed, these are allowed)
_SCHEDULE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "cosine": (set(), {"num_cycles"}),
    "cosine_with_min_lr": ({"min_lr", "min_lr_rate"}, {"min_lr", "min_lr_rate", "num_cycles"}),
    "warmup_stable_decay": ({"num_decay_steps"}, {"num_decay_steps", "min_lr_ratio", "num_cycles"}),
}

# keys that do not exist, or no longer -> what to write instead, or why there is none
GONE_KEYS: dict[str, str] = {
    "lossless": "there is no such switch: packets always go through zstd or lz4, which changes no value",
    "bnb_4bit_quant_type": "there is no such key: 4-bit weights are nf4",
    "use_rslora": "there is no such key: write lora_alpha times sqrt(lora_r), which is the same scale",
    "exclude_modules": "there is no such key: lora_target_modules names the modules that get adapters",
    "stochastic_rounding": "there is no such key: error feedback sends later what rounding has lost",
    "trim_ratio": "there is no such key: aggregation is mean or median",
    "clip_radius": "there is no such key: aggregation is mean or median",
    "topk_ratio_min": "there is no such key: `auto` adapts K from an eighth of topk_ratio on",
    "topk_ratio_max": "there is no such key: `auto` adapts K up to topk_ratio",
    "owner_error_decay": "there is no such key: the aggregator sends all of its error feedback",
    "weighting": "there is no such key: an update weighs as many tokens as it is of",
    "quant_bucket_size": "there is no such key: 128 values share a scale",
    "block_size": "there is no such key: blocks have 256 coordinates (sample_kind: element has none)",
    "chat_template_path": "write data.chat_template: FILE.jinja, and model.eos_token: what ends its turns",
    "dataset_text_field": "write column_map: {text: NAME}, which names any column",
    "method": "lora=true trains adapters; compression.preset names how updates are sent",
    "loss_watchdog_patience": "there is no such key: three rounds above loss_watchdog_threshold end the run",
}

# (key, value) -> what to write instead
VALUE_HINTS: dict[tuple[str, str], str] = {
    ("swarm.join", "open"): "`token`, and publish the run URL: it is all one needs",
}

# keys of `compression` that act once a round -> the value at which they do nothing
COUNTED_IN_ROUNDS = {"outer_momentum": 0.0, "error_decay": 1.0, "uncompressed_steps": 0}

# names of axolotl, LLaMA-Factory, torchtune, older transformers and the reference code. They are errors that
# give our name: silent synonyms would give one recipe two spellings with two hashes
_FOREIGN_NAMES: dict[str, str] = {  # ours -> theirs
    "model.model_name_or_path": "base_model model_name model_id",
    "model.model_revision": "revision_of_model hub_revision",
    "model.dtype": "torch_dtype",
    "model.tokenizer_name_or_path": "tokenizer tokenizer_name",
    "model.attn_implementation": "flash_attention flash_attn use_flash_attention_2 attention_implementation",
    "model.load_in_4bit": "qlora use_4bit quantization_bit",
    "model.bnb_4bit_use_double_quant": "use_bnb_nested_quant double_quantization bnb_4bit_nested_quant",
    "datasets": "dataset dataset_name dataset_path dataset_dir train_file train_dataset",
    "eval_datasets": "test_datasets eval_dataset validation_file",
    "data.max_length": "sequence_len sequence_length cutoff_len max_seq_length max_seq_len block_length",
    "data.packing": "sample_packing packed",
    "data.chat_template": "template",
    "data.completion_only_loss": "train_on_inputs train_on_input",
    "data.val_set_size": "val_size validation_split",
    "data.shuffle_dataset": "shuffle",
    "data.dataset_num_proc": "preprocessing_num_workers dataset_processes",
    "training.per_device_train_batch_size": "micro_batch_size",
    "training.global_batch_size": "batch_size gradient_accumulation_steps",
    "training.num_train_epochs": "num_epochs epochs",
    "training.max_steps": "steps max_steps_per_epoch",
    "training.learning_rate": "lr",
    "training.optim": "optimizer",
    "training.lr_scheduler_type": "lr_scheduler",
    "training.warmup_steps": "warmup_ratio",
    "training.activation_checkpointing": "gradient_checkpointing",
    "training.activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "training.max_grad_norm": "clip_grad_norm gradient_clipping",
    "training.seed": "random_state random_seed",
    "training.use_liger_kernel": "use_liger liger_kernel use_kernels",
    "compression.sample_kind": "random_method",
    "compression.random_ratio": "RANDOMP_RATIO p",
    "compression.topk_ratio": "TOPK_RATIO K k",
    "compression.quant_bits": "QUANT_BITS bits q",
    "compression.local_steps": "H inner_steps",
    "checkpoint.eval_steps": "eval_strategy evaluation_strategy evals_per_epoch",
    "checkpoint.save_steps": "save_strategy saves_per_epoch",
    "lora.lora_r": "lora_rank r",
    "lora.lora_target_modules": "lora_target target_modules lora_target_linear",
    "lora.target_parameters": "lora_target_parameters",
    "lora.use_dora": "dora peft_use_dora",
    "lora.lora_modules_to_save": "modules_to_save additional_target",
    "lora": "finetuning_type adapter use_peft peft_config",
}


def gone_keys(of: type[Recipe]) -> dict[str, str]:
    """Return what to write instead of keys that a schema does not have, by their names."""
    return GONE_KEYS | {name: why for _, one in extension_sections(of) for name, why in one.gone_keys.items()}


def foreign_keys(of: type[Recipe]) -> dict[str, str]:
    """Return the dotted keys of a schema by the names that other tools have for them."""
    tables = [_FOREIGN_NAMES, *(one.foreign_names for _, one in extension_sections(of))]
    return {theirs: ours for names in tables for ours, them in names.items() for theirs in them.split()}


MASKED = ("adamw_torch_fused", "adamw_torch")  # optimizers that momentum_masking knows


def check(document: Document, problems: list[Problem], extend: Extend = heart_alone) -> Recipe:
    """Build the frozen recipe. Errors: RecipeError with `problems` and everything found here."""
    recipe = None
    try:
        recipe = extend(document.values).model_validate(document.values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [*problems, *(_explain(document, detail, extend) for detail in found if _is_new(detail))]
    if recipe is not None:
        for conflict in _conflicts(recipe, extend):
            key = tuple(int(part) if part.isdecimal() else part for part in conflict.key.split("."))
            problems = [*problems, document.problem(key, conflict.message, conflict.hint)]
    if recipe is None or problems:
        first = {(problem.place, problem.key): problem for problem in reversed(problems)}
        # a union reports one mistake once for each branch: keep the first
        raise RecipeError([p for p in problems if first[p.place, p.key] is p], document.file)
    return recipe


def _conflicts(recipe: Recipe, extend: Extend) -> Iterator[Conflict]:
    """Yield contradictions between keys."""
    data, training, swarm = recipe.data, recipe.training, recipe.swarm
    batch, fewest = training.global_batch_size, swarm.min_peers
    if batch < fewest:
        text = f"{batch} samples cannot be shared by swarm.min_peers={fewest}"
        yield Conflict("training.global_batch_size", text)
    if swarm.max_peers is not None and swarm.max_peers < fewest:
        yield Conflict("swarm.max_peers", f"{swarm.max_peers} is below swarm.min_peers={fewest}")
    if not recipe.datasets and not recipe.objective.invitation():
        given = "datasets" in recipe.model_fields_set
        yield Conflict("datasets", "needs at least one entry" if given else "is required")
    weighted = [dataset.weight is not None for dataset in recipe.datasets]
    for number, has_weight in enumerate(weighted):
        if any(weighted) and not has_weight:
            yield Conflict(f"datasets.{number}.weight", "is required where another data set has one")
    for number, dataset in enumerate(recipe.eval_datasets):
        if dataset.weight is not None:
            text = "means nothing here: all of what is held out is measured"
            yield Conflict(f"eval_datasets.{number}.weight", text)
    yield from _row_type_conflicts(recipe, extend)
    if data.streaming:
        yield from _streaming_conflicts(recipe)
    if data.val_set_size and recipe.eval_datasets:
        text = "excluded by eval_datasets: the held-out rows come from one or the other"
        yield Conflict("data.val_set_size", text)
    if recipe.checkpoint.eval_steps and not recipe.has_eval:
        yield Conflict("checkpoint.eval_steps", "there is nothing to evaluate on", "data.val_set_size=0.05")
    if training.max_steps == 0 or training.max_steps < -1:
        text = f"must be at least 1, or -1 for whole epochs, not {training.max_steps}"
        yield Conflict("training.max_steps", text)
    yield from _schedule_conflicts(recipe)
    yield from _dtype_conflicts(recipe)
    yield from _compression_conflicts(recipe)
    for section in recipe.extensions.values():
        yield from section.conflicts(recipe)
    if recipe.lora is not None and recipe.lora.target_parameters:
        if recipe.lora.use_dora:
            yield Conflict("lora.use_dora", "excluded by target_parameters, as in PEFT")
        if recipe.lora.lora_dropout:
            text = "must be 0 with target_parameters: it cannot stand before a parameter"
            yield Conflict("lora.lora_dropout", text, "lora_dropout=0")


def _row_type_conflicts(recipe: Recipe, extend: Extend) -> Iterator[Conflict]:
    """Yield types of rows that nobody reads, or that an extension reads which the run does not use."""
    for name, datasets in (("datasets", recipe.datasets), ("eval_datasets", recipe.eval_datasets)):
        for number, kind in enumerate(dataset.type for dataset in datasets):
            if kind in (*ROW_TYPES, recipe.objective.row_type):
                continue
            key, known = f"{name}.{number}.type", [*map(repr, ROW_TYPES)]
            readers = [of for of, one in extension_sections(extend(None)) if one.row_type == kind]
            if readers:
                yield Conflict(key, f"`{kind}` needs a section `{readers[0]}:`", f"{readers[0]}={{}}")
            else:
                yield Conflict(key, f"must be {', '.join(known[:-1])} or {known[-1]}, not {kind!r}")


def _compression_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    compression, steps = recipe.compression, recipe.training.max_steps
    if compression.preset == "lora-cocktail" and recipe.lora is None:
        hint = "add a section `lora:`, or `cocktail`"
        yield Conflict("compression.preset", "`lora-cocktail` is for adapters", hint)
    if 0 < steps < (fewest := compression.step_rungs[0]):
        text = f"{fewest}: a run of {steps} steps would exchange nothing before its end"
        yield Conflict("compression.local_steps", text, f"local_steps={max(1, steps // 10)}")
    if compression.local_steps == "auto":
        yield from _auto_conflicts(compression)
    if compression.momentum_masking and (optim := recipe.training.optim) not in MASKED:
        text = f"`{optim}` has no first moment in float32 that could be masked"
        yield Conflict("compression.momentum_masking", text, f"optim={MASKED[0]}")
    if 0 < compression.topk_chunk * compression.topk_ratio < 0.5:
        text = f"topk_ratio {compression.topk_ratio:g} keeps none of {compression.topk_chunk} values"
        yield Conflict("compression.topk_chunk", text, "a larger chunk")


def _auto_conflicts(compression: Compression) -> Iterator[Conflict]:
    """Yield keys that mean something else in rounds of another length, which `local_steps: auto` chooses."""
    key = "compression.local_steps"
    if not compression.staleness:
        text = "`auto` chooses rounds that hide their exchange, and with staleness 0 none is hidden"
        yield Conflict(key, text, "staleness=1, or a number of local_steps")
    for name, usual in COUNTED_IN_ROUNDS.items():
        if (given := getattr(compression, name)) != usual:
            text = f"`auto` is excluded by {name} {given:g}, which is counted in rounds"
            yield Conflict(key, text, f"{name}={usual:g}, or a number of local_steps")


def _streaming_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Yield keys that would need all rows before the first step."""
    data = recipe.data
    if recipe.training.max_steps == -1:
        hint = "max_steps=1000, or data.streaming=false for whole epochs"
        yield Conflict("training.max_steps", "is required where data.streaming is on", hint)
    if 0 < data.val_set_size < 1:
        text = "must be a number of rows where data.streaming is on: how many there are is not known"
        yield Conflict("data.val_set_size", text)
    if len(recipe.datasets) > 1 and recipe.datasets[0].weight is None:
        yield Conflict("datasets.0.weight", "is required where several data sets are streamed")
    for number, dataset in enumerate(recipe.datasets):
        if "[" in dataset.split:
            text = "cannot be a slice where data.streaming is on"
            yield Conflict(f"datasets.{number}.split", text, "max_samples: 1000")
    if data.dataset_num_proc not in (None, 1):
        yield Conflict("data.dataset_num_proc", "a stream is tokenized by one process")


def _dtype_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    model, training = recipe.model, recipe.training
    if model.load_in_8bit and model.load_in_4bit:
        yield Conflict("model.load_in_8bit", "8 bit and 4 bit exclude each other")
    if model.quantized and recipe.lora is None:
        bits = "model.load_in_4bit" if model.load_in_4bit else "model.load_in_8bit"
        yield Conflict(bits, "only a frozen base can be quantized", "add a section `lora:`")
    if model.bnb_4bit_use_double_quant and not model.load_in_4bit:
        text = "means nothing without 4-bit weights"
        yield Conflict("model.bnb_4bit_use_double_quant", text, "model.load_in_4bit=true")
    if training.bf16 is True and training.fp16:
        yield Conflict("training.fp16", "excluded by bf16")
    if not training.fp32_master_weights and recipe.lora is not None:
        yield Conflict("training.fp32_master_weights", "adapters are always trained in float32")
    elif not training.fp32_master_weights and model.dtype != "bfloat16":
        text = "only bfloat16 weights are trained without"
        yield Conflict("training.fp32_master_weights", text, "model.dtype=bfloat16")
    if recipe.lora is None and model.dtype == "float16":
        hint = "model.dtype=bfloat16, or float32 with training.fp16=true"
        yield Conflict("model.dtype", "float16 holds no gradients of weights that are trained", hint)
    if recipe.lora is None and model.dtype == "bfloat16" and training.fp16:
        yield Conflict("training.fp16", "excluded by model.dtype `bfloat16`")


def _schedule_conflicts(recipe: Recipe) -> Iterator[Conflict]:
    key = "training.lr_scheduler_kwargs"
    kind, given = recipe.training.lr_scheduler_type, set(recipe.training.lr_scheduler_kwargs)
    needed, allowed = _SCHEDULE_KEYS.get(kind, (set(), set()))
    if given - allowed:
        hint = f"it takes {', '.join(sorted(allowed))}" if allowed else "it takes none"
        yield Conflict(key, f"`{kind}` does not take {', '.join(sorted(given - allowed))}", hint)
    if needed and len(given & needed) != 1:
        yield Conflict(key, f"`{kind}` needs one of {', '.join(sorted(needed))}")


def _is_new(detail: Any) -> bool:
    """False for "too short" of a list whose only entry is wrong: that entry is reported already."""
    return not (detail["type"] == "too_short" and detail.get("input"))


def _explain(document: Document, detail: Any, extend: Extend) -> Problem:
    """Turn a pydantic error into a problem in our words."""
    key: Key = tuple(detail["loc"])
    kind, context, given = detail["type"], detail.get("ctx", {}), detail.get("input")
    while key and key not in document.lines and key not in document.overridden and kind != "missing":
        key = key[:-1]  # pydantic adds the branch of a union: ("data_files", "str")
    key = key or tuple(detail["loc"])
    if kind == "extra_forbidden":
        return unknown_key(document, tuple(detail["loc"]), extend(None))
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
        "finite_number": "must be a finite number",
        "string_pattern_mismatch": "must be lower-case letters, digits, dots and dashes, at most 64",
        "value_error": str(context.get("error", "")),
    }
    message = messages.get(kind, detail["msg"])
    hint = ""
    if isinstance(given, bool) and kind == "model_type":
        hint = f"`{key[-1]}: {{}}` has its defaults"
    elif isinstance(given, bool) and kind in {"string_type", "literal_error"}:
        hint = "YAML reads yes, no, on and off as true or false; put it in quotes"
    elif isinstance(given, str):
        tables = [VALUE_HINTS, *(one.value_hints for _, one in extension_sections(extend(None)))]
        hint = next(filter(None, (hints.get((".".join(map(str, key)), given)) for hints in tables)), "")
        hint = hint or near_value(given, re.findall("'([^']+)'", str(context.get("expected", ""))))
    if kind not in {"value_error", "too_short", "string_too_short"} and not isinstance(given, dict | list):
        message += f", not {'null' if given is None else repr(given)}"
    return document.problem(key, message, hint)


def near_value(given: str, known: Sequence[str]) -> str:
    """Ask for the value that was probably meant: one that has the given word, or the nearest; "" for none."""
    whole = [one for one in known if given in one.split("-")]
    near = whole or difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def unknown_key(document: Document, key: Key, of: type[Recipe] = Recipe) -> Problem:
    """Describe an unknown key, with the key of this schema that was probably meant."""
    name = str(key[-1])
    inside, bare = sections(of), bare_keys(of)
    where = inside.get(str(key[0])) if len(key) > 1 else of
    if key[0] in ("datasets", "eval_datasets") and len(key) > 1:
        where = Dataset
    if key[:2] == ("swarm", "requires") and len(key) > 2:
        where = Requires
    known = list(where.model_fields) if where else []
    if why := gone_keys(of).get(name):
        return document.problem(key, why)
    if ours := foreign_keys(of).get(name):
        hint = "it means the opposite" if name.startswith("train_on_input") else ""
        return document.problem(key, f"cocktail calls this {ours}", hint)
    right = bare.get(name)
    if right is not None and right != key:
        place = f"under `{right[0]}:`" if len(right) > 1 else "at the top level"
        return document.problem(key, f"it belongs {place}")
    if len(key) > 1 and name in of.model_fields:
        return document.problem(key, "it belongs at the top level")
    if len(key) == 1 and name in Dataset.model_fields:
        return document.problem(key, "it belongs under `datasets:`")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near:
        return document.problem(key, f"did you mean `{near[0]}`?")
    elsewhere = difflib.get_close_matches(name, list(bare), n=1, cutoff=0.8)
    if elsewhere:
        full = ".".join(str(part) for part in bare[elsewhere[0]])
        return document.problem(key, f"did you mean `{full}`?")
    return document.problem(key, "unknown key", f"known here: {', '.join(known)}" if known else "")


# ---- keys in words -----------------------------------------------------------------------------------------

TYPES = {"integer": "whole number", "string": "text", "boolean": "true | false", "object": "mapping"}
LIMITS = {  # keyword of JSON schema -> attribute of pydantic's metadata, word for people
    "minimum": ("ge", "from"),
    "exclusiveMinimum": ("gt", "above"),
    "maximum": ("le", "to"),
    "exclusiveMaximum": ("lt", "below"),
}


@dataclass(frozen=True)
class KeyDescription:
    """One key in words."""

    key: str  # dotted, as an override takes it
    default: str  # as YAML takes it, or "required"
    type: str
    meaning: str


@dataclass(frozen=True)
class Place:
    """A section, or one field of it."""

    above: str  # dotted key of the section, "" for the recipe itself
    section: type[Section]
    field: str | None = None


def describe_keys(name: str = "", of: type[Recipe] = Recipe) -> list[KeyDescription]:
    """Describe the keys of section `name`, the key `name`, or all keys. Errors: RecipeError."""
    place = find(name, of)
    found = _walk(place.section, f"{place.above}." if place.above else "", set())
    wanted = f"{place.above}.{place.field}".lstrip(".") if place.field else None
    return [row for row in found if wanted in (None, row.key)]


def json_schema(name: str = "", of: type[Recipe] = Recipe) -> dict[str, Any]:
    """JSON schema of the same. Errors: RecipeError."""
    place = find(name, of)
    schema = place.section.model_json_schema()
    return dict(schema["properties"][place.field]) if place.field else schema


def find(name: str, of: type[Recipe] = Recipe) -> Place:
    """Find a section, or a field by its dotted or bare name. Errors: RecipeError with a suggestion."""
    place, parts = Place("", of), tuple(part for part in name.split(".") if part and not part.isdecimal())
    if len(parts) == 1 and parts[0] in Dataset.model_fields and parts[0] not in bare_keys(of):
        parts = ("datasets", *parts)
    elif len(parts) == 1:
        parts = tuple(map(str, bare_keys(of).get(parts[0], parts)))
    for part in parts:
        field = place.section.model_fields.get(part) if place.field is None else None
        if field is None:
            raise RecipeError([unknown_key(Document("schema.py", {}, overridden={parts: name}), parts, of)])
        inner, many = _section_in(field.annotation)
        above = f"{place.above}.{part}".lstrip(".") + (".0" if many else "")
        place = Place(above, inner) if inner else Place(place.above, place.section, part)
    return place


def _walk(section: type[Section], above: str, seen: set[type[Section]]) -> Iterator[KeyDescription]:
    """Yield the keys of a section and of its subsections; a repeated subsection is described once."""
    seen.add(section)
    properties = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        inner, many = _section_in(field.annotation)
        if inner is not field.annotation:  # a section that always exists has no row of its own
            default = "required" if field.is_required() else _as_yaml(field.get_default())
            typed = _type_in_words(properties[name] | _limits(field))
            yield KeyDescription(f"{above}{name}", default, typed, field.description or "")
        if inner and inner not in seen:
            yield from _walk(inner, f"{above}{name}.0." if many else f"{above}{name}.", seen)


def _section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, and True where it is a list of them."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part, Ellipsis in get_args(annotation)
    return None, False


def _limits(field: FieldInfo) -> dict[str, Any]:
    """Limits behind our own validators, which pydantic leaves out of the JSON schema."""
    return {
        name: getattr(limit, attribute)
        for limit in field.metadata
        for name, (attribute, _) in LIMITS.items()
        if hasattr(limit, attribute)
    }


def _type_in_words(schema: dict[str, Any]) -> str:
    if "format" in schema:
        return str(schema["format"])
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " | ".join(_type_in_words(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        return f"list: {_type_in_words(schema['items'])}"
    limits = [f"{word} {_as_yaml(schema[name])}" for name, (_, word) in LIMITS.items() if name in schema]
    return ", ".join([TYPES.get(schema["type"], schema["type"]), *limits])


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
