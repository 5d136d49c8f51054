"""Load recipes by name, path or https address: `load_recipe("smoke", ["learning_rate=1e-4"])`.

Precedence: override > recipe > default; never the environment, so two people with one recipe get one run.
Nothing here imports torch or transformers: the CLI checks recipes while it completes a command line.

Plain values become a `Recipe`, or everything that is wrong with them is told at once. Two passes: pydantic
checks names, types and ranges, then the cross-checks look at keys together. The type, the default and the
meaning of each key are read from the schema.

A recipe from the web may not name local files: its author is not the one who runs it, and the data of a run
go to all peers. What was set here, by an override, --data or --model, may be local; of that, others are told
the names alone.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, get_args
from urllib.parse import urlparse

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from recipes.downloads import DownloadError, fetch_text
from recipes.errors import Problem, RecipeError
from recipes.foreign_json import parse_json

from .document import (
    MAX_BYTES,
    Document,
    Extend,
    Key,
    bare_keys,
    decoded,
    extension_sections,
    heart_alone,
    override,
    parse,
    read,
    resolve,
    sections,
    set_value,
)
from .schema import ROW_TYPES, Conflict, Dataset, Recipe, Requires, Section

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
    **dict.fromkeys(("trim_ratio", "clip_radius"), "there is no such key: aggregation is mean or median"),
    **dict.fromkeys(
        ("topk_ratio_min", "topk_ratio_max"), "there is no such key: `auto` adapts an unwritten K"
    ),
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
    ("compression.local_steps", "auto"): "leave it out: `compression.auto` chooses it by lines and members",
    ("swarm.join", "open"): "`token`, and publish the run URL: it is all one needs",
}

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
        every = error.errors(include_url=False)
        # "too short" of a list whose only entry is wrong: that entry is reported already
        found = (one for one in every if not (one["type"] == "too_short" and one.get("input")))
        problems = [*problems, *(_explain(document, detail, extend) for detail in found)]
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
    if not recipe.datasets and not recipe.objective.invitation:
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
    if 0 < steps < (fewest := compression.local_steps):
        text = f"{fewest}: a run of {steps} steps would exchange nothing before its end"
        yield Conflict("compression.local_steps", text, f"local_steps={max(1, steps // 10)}")
    if compression.momentum_masking and (optim := recipe.training.optim) not in MASKED:
        text = f"`{optim}` has no first moment in float32 that could be masked"
        yield Conflict("compression.momentum_masking", text, f"optim={MASKED[0]}")
    if 0 < compression.topk_chunk * compression.topk_ratio < 0.5:
        text = f"topk_ratio {compression.topk_ratio:g} keeps none of {compression.topk_chunk} values"
        yield Conflict("compression.topk_chunk", text, "a larger chunk")


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
        inner = schema.get("items") or schema["prefixItems"][0]  # of a tuple
        return f"list: {_type_in_words(inner)}"
    limits = [f"{word} {_as_yaml(schema[name])}" for name, (_, word) in LIMITS.items() if name in schema]
    return ", ".join([TYPES.get(schema["type"], schema["type"]), *limits])


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


TEMPLATES = Path(__file__).parent.parent / "templates"


# ---- local paths and hub ids -------------------------------------------------------------------------------

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")  # each also with .gz behind it
NOT_LOCAL = "a recipe from the web may only name what is on the hub, at https, or builtin"


def is_hub_id(path: str) -> bool:
    """True for the id of a hub data set: neither an existing path nor anything that looks like one."""
    named = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not looks_like_path(path)
    return bool(named) and data_suffix(Path(path)) not in DATA_SUFFIXES and not Path(path).exists()


def looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).is_absolute()


def data_suffix(path: Path) -> str:
    """The suffix that tells the format of a data file; of one that is compressed, the suffix before `.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def local_paths(document: Document, recipe: Recipe) -> list[Problem]:
    """Problems of a recipe from the web: the keys in its text that name local files."""
    return [
        document.problem(key, f"{value} is of this machine: {NOT_LOCAL}", hint)
        for key, value, hint in _named_paths(recipe)
        if value is not None and (document.origin(key) or "").startswith(f"{document.file}:")
    ]


def _named_paths(recipe: Recipe) -> Iterator[tuple[Key, str | None, str]]:
    """Yield (key, its value where that is local, hint)."""
    model, template = recipe.model, recipe.data.chat_template
    yield ("model", "model_name_or_path"), _if_local(model.model_name_or_path), "--model FOLDER"
    if model.tokenizer_name_or_path is not None:
        hint = "tokenizer_name_or_path=FOLDER"
        yield ("model", "tokenizer_name_or_path"), _if_local(model.tokenizer_name_or_path), hint
    for section in ("datasets", "eval_datasets"):
        for number, dataset in enumerate(getattr(recipe, section)):
            hint = f"{section}.{number}.path=FILE"
            yield (section, number, "path"), _if_local(dataset.path), hint
            yield (section, number, "data_files"), _outside_repository(dataset), hint
    shipped = {"auto", *(file.stem for file in TEMPLATES.glob("*.jinja"))}
    yield ("data", "chat_template"), None if template in shipped else template, "chat_template=FILE"
    folder = recipe.checkpoint.output_dir
    yield ("checkpoint", "output_dir"), folder if _escapes(folder) else None, "checkpoint.output_dir=DIR"


def _if_local(path: str) -> str | None:
    return None if is_hub_id(path) or path.startswith(("builtin:", "http://", "https://")) else path


def _outside_repository(dataset: Dataset) -> str | None:
    files = dataset.data_files or ()
    files = (files,) if isinstance(files, str) else files
    return next((name for name in files if _escapes(name) and not name.startswith("https://")), None)


def _escapes(path: str) -> bool:
    """True where a path may lie outside the folder it is relative to."""
    rooted = PurePosixPath(path).is_absolute() or bool(PureWindowsPath(path).anchor)
    return rooted or path.startswith("~") or ":" in path or ".." in path.replace("\\", "/").split("/")


# ---- names of a run ----------------------------------------------------------------------------------------

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
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"checkpoint"})
    for key in ("model_name_or_path", "tokenizer_name_or_path"):
        if values["model"].get(key):
            values["model"][key] = public_name(values["model"][key])
    for dataset in (*values.get("datasets", ()), *values.get("eval_datasets", ())):
        dataset["path"] = public_name(dataset["path"])
    return values


# ---- loading -----------------------------------------------------------------------------------------------

LIBRARY = Path(__file__).parent.parent / "library"


@dataclass(frozen=True)
class Source:
    """The text of a recipe and where it comes from."""

    file: str  # path or address
    name: str  # of the file alone
    text: str


@dataclass(frozen=True)
class Resolved:
    """A checked recipe with the document it comes from."""

    recipe: Recipe
    document: Document  # `document.origin(key)`: where a value was set


def load_recipe(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    data: str | None = None,  # replaces `datasets`
    model: str | None = None,  # replaces model.model_name_or_path, its revision and its tokenizer
    extend: Extend = heart_alone,  # the schema with sections of extensions
) -> Recipe:
    """Load and check a recipe: a frozen `Recipe`. Errors: RecipeError with every problem and its line."""
    return load_resolved(name_or_path, overrides, data, model, extend=extend).recipe


def load_resolved(
    name_or_path: str | Path,
    overrides: Sequence[str] = (),
    data: str | None = None,
    model: str | None = None,
    chosen: Mapping[str, Any] = MappingProxyType({}),
    extend: Extend = heart_alone,
) -> Resolved:
    """Load a recipe as `load_recipe` does, and keep its document.

    Args:
        chosen: values of dotted keys that win over the recipe, and that overrides win over.
        extend: the schema with sections of extensions.
    """
    source = source_of(name_or_path, extend)
    document = parse(source.text, source.file)
    for name, value in chosen.items():
        key = resolve(name)
        set_value(document.values, key, value)
        document.overridden[key] = "chosen by model, data and memory"
    if data is not None:
        document.values["datasets"] = [{"path": data}]
        document.overridden[("datasets",)] = f"--data {data}"
    if model is not None:
        former = document.values.get("model")
        section = dict(former) if isinstance(former, dict) else {}
        for former_key in ("model_revision", "tokenizer_name_or_path", "pad_token"):
            section.pop(former_key, None)
            document.lines.pop(("model", former_key), None)
        document.values["model"] = {**section, "model_name_or_path": model}
        document.overridden[("model", "model_name_or_path")] = f"--model {model}"
        if str(name_or_path) == NEUTRAL:
            rows = data or document.values["datasets"][0]["path"]
            document.values["name"] = run_name(model, rows)
            document.values["description"] = describe(model, rows)
    recipe = check(document, override(document, overrides, extend), extend)
    if _is_address(source.file) and (problems := local_paths(document, recipe)):
        raise RecipeError(problems, source.file)
    return Resolved(recipe, document)


def recipe_from_json(text: str, extend: Extend | None = heart_alone, former: bool = False) -> Recipe:
    """Parse the resolved recipe that a peer receives (`Recipe.to_json`). Errors: RecipeError.

    Args:
        extend: the schema with sections of extensions; None: these sections are left out.
        former: it is of an earlier version: keys that are gone since then are left out, and values of how
            updates were sent.
    """
    try:
        values = parse_json(text)
        given: dict[str, Any] = values if isinstance(values, dict) else {}
        if extend is None:
            ours = {name: value for name, value in given.items() if name in Recipe.model_fields}
            return Recipe.model_validate_json(json.dumps(ours))
        return extend(given).model_validate_json(text)
    except ValueError as error:
        found = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        gone = [e["loc"] for e in found if e["type"] == "extra_forbidden" or e["loc"][:1] == ("compression",)]
        if former and gone:
            for key in gone:
                set_value(given, key, None)
            return recipe_from_json(json.dumps(given), extend)
        problems = [
            Problem("the run's recipe", None, ".".join(map(str, e["loc"])), e["msg"]) for e in found
        ] or [Problem("the run's recipe", None, "", str(error))]
        raise RecipeError(problems, "the run's recipe (is it from another version?)") from None


def source_of(name_or_path: str | Path, extend: Extend = heart_alone) -> Source:
    """Read the text of a shipped recipe, a path, or an https address, which each command fetches anew.

    Errors: RecipeError.
    """
    file = str(name_or_path)
    if not _is_address(file):
        path = recipe_path(name_or_path, extend)
        return Source(str(path), path.name, read(path))
    try:
        if not file.startswith("https://"):
            raise DownloadError("recipes are read from https addresses only")
        text = decoded(fetch_text(file, MAX_BYTES), file)
    except DownloadError as error:
        raise RecipeError([Problem(file, None, "", str(error))]) from None
    name = Path(urlparse(file).path).name or "recipe"
    return Source(file, name if name.endswith((".yaml", ".yml")) else f"{name}.yaml", text)


def _is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def shipped_recipes(extend: Extend = heart_alone) -> dict[str, Path]:
    """Return the files of the shipped recipes by name: ours, and those beside the keys of extensions."""
    modules = (sys.modules[section.__module__] for _, section in extension_sections(extend(None)))
    folders = (LIBRARY, *(Path(str(module.__file__)).parent for module in modules))
    return {file.stem: file for folder in folders for file in folder.glob("*.yaml")}


def recipe_path(name_or_path: str | Path, extend: Extend = heart_alone) -> Path:
    """Find the file of a shipped recipe or of a path. Errors: RecipeError with the nearest name."""
    text = str(name_or_path)
    path = Path(text).expanduser()
    if (shipped := shipped_recipes()).get(text) is None and not path.is_file():
        shipped = shipped_recipes(extend)
    if text in shipped:
        return shipped[text]  # a name wins over a file of that name: `smoke` is the same run everywhere
    if path.is_file():
        return path
    if path.is_dir():
        message, hint = "is a folder, not a recipe", ""
    elif path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1)
        message = "no such file"
        hint = f"did you mean {path.with_name(near[0])}?" if near else "shipped ones: cocktail recipes list"
    else:
        near = difflib.get_close_matches(text, shipped, n=1, cutoff=0.5)
        message = "no recipe of this name and no such file"
        hint = f"did you mean `{near[0]}`?" if near else f"shipped: {', '.join(sorted(shipped))}"
    raise RecipeError([Problem(text, None, "", message, hint)])


def list_recipes(extend: Extend = heart_alone) -> list[Recipe]:
    """Load every shipped recipe: that for a model of one's own, the smallest, then the others by name."""
    first = (NEUTRAL, "smoke")
    names = sorted(shipped_recipes(extend), key=lambda name: (name not in first, name))
    return [load_recipe(name, extend=extend) for name in names]
