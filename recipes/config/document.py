"""Parse the text of a recipe: YAML to plain values, with the line of every key and the overrides applied.

`yaml.safe_load` only, so a recipe builds nothing but lists, mappings, text and numbers. Aliases are refused:
no recipe needs them, and nested ones grow without bound. The names of keys, as other commands and tools write
them, are here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml

from recipes.errors import Problem, RecipeError

from .presets import DEFAULT, keys_of
from .schema import Dataset, ExtensionSection, Recipe, Section

Key = tuple[str | int, ...]  # ("datasets", 0, "path")

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
LONGEST_NUMBER = 100  # characters; PyYAML computes one of base 60 in a time that grows as their square
NUMBER = re.compile(r"[-+]?[.0-9][-+.:_0-9a-fA-Fox]*")
# (typed key, key of the recipe that it excludes, or that would beat it)
EXCLUSIVE: tuple[tuple[Key, Key], ...] = (
    (("training", "num_train_epochs"), ("training", "max_steps")),
    (("data", "val_set_size"), ("eval_datasets",)),
    (("eval_datasets",), ("data", "val_set_size")),
    (("model", "load_in_8bit"), ("model", "load_in_4bit")),
    (("model", "load_in_4bit"), ("model", "load_in_8bit")),
    (("training", "bf16"), ("training", "fp16")),
    (("training", "fp16"), ("training", "bf16")),
)
# keys that mean nothing without adapters: `lora=null` excludes them
ADAPTERS_ONLY: tuple[Key, ...] = (
    ("model", "load_in_4bit"),
    ("model", "load_in_8bit"),
    ("compression", "preset"),
)


@dataclass
class Document:
    """A recipe before it is checked: plain values, and where each was set."""

    file: str  # its path, or its address
    values: dict[str, Any]
    lines: dict[Key, int] = field(default_factory=dict)
    overridden: dict[Key, str] = field(default_factory=dict)  # key -> text of the override
    notes: list[str] = field(default_factory=list)  # what was left out for what was typed

    def origin(self, key: Key) -> str | None:
        """Say where `key` was set: an override, a line of the file, or a preset. None: it is the default."""
        for depth in range(len(key), 0, -1):
            if key[:depth] in self.overridden:
                return self.overridden[key[:depth]]
        if key in self.lines:
            return f"{self.file}:{self.lines[key]}"
        if key[0] != "compression":
            return None
        section = self.values.get("compression")
        name = (section.get("preset") if isinstance(section, dict) else None) or DEFAULT
        keys = keys_of(name, self.values.get("lora") is not None)
        return f"preset {name}" if key[-1] in keys else None

    def problem(self, key: Key, message: str, hint: str = "") -> Problem:
        """Make a problem at `key`, with the line of the key or of the section around it."""
        name = ".".join(str(part) for part in key)
        if (origin := self.origin(key) or "").startswith("preset "):
            key, message = ("compression", "preset"), f"by {origin}, {message}"
        above = (key[:depth] for depth in range(len(key), 0, -1))
        nearest = next((one for one in above if one in self.overridden or one in self.lines), key)
        below = any(given[: len(key)] == key for given in self.overridden)  # `lora`, because of lora_r=8
        if below or nearest in self.overridden:
            return Problem("override", None, name, message, hint)
        return Problem(self.file, self.lines.get(nearest), name, message, hint)


def read(path: Path) -> str:
    """Read a recipe's file. Errors: RecipeError where it does not open, or is not UTF-8."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError([Problem(str(path), None, "", "larger than 1 MiB: this is no recipe")])
        return decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise RecipeError([Problem(str(path), None, "", f"cannot be read: {error.strerror}")]) from None


def decoded(data: bytes, file: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "save the file as UTF-8"
        raise RecipeError([Problem(file, None, "", f"not UTF-8 text: {error.reason}", hint)]) from None


def parse(text: str, file: str) -> Document:
    """Parse YAML text. Errors: RecipeError where it is not YAML, not a mapping, or has a key twice."""
    try:
        _check_events(text, file)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or "cannot be read as YAML"
        line = mark.line + 1 if mark else None
        hint = "indent with spaces, not tabs" if "\\t" in what else ""
        raise RecipeError([Problem(file, line, "", f"not valid YAML: {what}", hint)]) from None
    except (ValueError, OverflowError) as error:  # a date such as 2026-13-40
        raise RecipeError([Problem(file, None, "", f"not valid YAML: {error}")]) from None
    if not isinstance(values, dict):
        what = "the file is empty" if values is None else "a recipe is a mapping of keys to values"
        raise RecipeError([Problem(file, 1, "", what, "one to change: cocktail recipes copy smoke my.yaml")])
    document = Document(file, values)
    twice = _index(node, (), document)
    if twice:
        raise RecipeError(twice)
    return document


def _check_events(text: str, file: str) -> None:
    """Refuse aliases, tags, nesting that would exhaust the stack, and endless numbers, before anything is
    built."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            message = "YAML aliases (`*name`) have no place in a recipe"
        elif (tag := getattr(event, "tag", None)) is not None:
            message = f"YAML tags (`{tag}`) have no place in a recipe"
        elif depth > MAX_DEPTH:
            message = "nested deeper than any recipe"
        elif is_endless(event):
            message = f"a number of {len(event.value):,} characters"
        else:
            continue
        raise RecipeError([Problem(file, line, "", message)])


def is_endless(event: yaml.Event) -> bool:
    """Tell whether YAML would read a scalar as a number that is too long for any key."""
    plain = isinstance(event, yaml.ScalarEvent) and event.style is None
    return plain and len(event.value) > LONGEST_NUMBER and NUMBER.fullmatch(event.value) is not None


def _index(node: yaml.Node, key: Key, document: Document) -> list[Problem]:
    """Fill `document.lines`; returns keys that are written twice (YAML would silently keep the last)."""
    twice: list[Problem] = []
    inner: Key
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            inner = (*key, str(name.value))
            line = name.start_mark.line + 1
            if inner in document.lines:
                message = f"written twice, first in line {document.lines[inner]}"
                twice.append(Problem(document.file, line, ".".join(map(str, inner)), message))
            document.lines[inner] = line
            twice += _index(value, inner, document)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            inner = (*key, place)
            document.lines[inner] = value.start_mark.line + 1
            twice += _index(value, inner, document)
    return twice


# returns the schema with the sections of the extensions among these names; of all of them: None
Extend = Callable[[Iterable[str] | None], type[Recipe]]


def heart_alone(names: Iterable[str] | None) -> type[Recipe]:
    """Return the schema without extensions."""
    return Recipe


def sections(of: type[Recipe] = Recipe) -> dict[str, type[Section]]:
    """The schema's sections by name, without `datasets` and `eval_datasets` (lists)."""
    found: dict[str, type[Section]] = {}
    for name, info in of.model_fields.items():
        union = isinstance(info.annotation, UnionType)
        for kind in get_args(info.annotation) if union else (info.annotation,):
            if isinstance(kind, type) and issubclass(kind, Section):
                found[name] = kind
    return found


def extension_sections(of: type[Recipe]) -> list[tuple[str, type[ExtensionSection]]]:
    """List a schema's sections of extensions, with their names."""
    return [(name, one) for name, one in sections(of).items() if issubclass(one, ExtensionSection)]


def bare_keys(of: type[Recipe] = Recipe) -> dict[str, Key]:
    """Bare name -> full key, for every key that has a bare name: leaf names are unique (a test checks it)."""
    inside = sections(of)
    found: dict[str, Key] = {name: (name,) for name in of.model_fields if name not in inside}
    for section, model in inside.items():
        found.update({leaf: (section, leaf) for leaf in model.model_fields})
    return found


def override(document: Document, texts: Sequence[str], extend: Extend = heart_alone) -> list[Problem]:
    """Apply `key=value` arguments of the command line to `document`; returns those that do not apply.

    The key is a dotted path or a bare leaf name; lists take an index (`datasets.0.path=x`); the value is
    YAML; `null` resets the key to its default. An optional section may be `true`, as it is or with its
    defaults, or `false`. A key of the recipe that excludes a typed one is left out.
    """
    problems: list[Problem] = []
    typed: dict[Key, Any] = {}
    datasets = document.values.get("datasets")
    for text in texts:
        name, equals, value_text = text.partition("=")
        if not equals or not name.strip():
            hint = f"--data {text}" if Path(text).exists() else ""
            problems.append(Problem("override", None, text, "an override is written key=value", hint))
            continue
        try:
            value = parse_value(value_text)
            key = resolve(name.strip(), len(datasets) if isinstance(datasets, list) else 0, extend)
            if isinstance(value, bool) and is_optional(key, extend(map(str, key))):
                value = (_held(document.values, key) or {}) if value else None
            set_value(document.values, key, value)
        except ValueError as error:
            problems.append(Problem("override", None, name, str(error)))
            continue
        document.overridden[key] = text
        typed[key] = value
    for key, value in typed.items():
        _leave_out_excluded(document, key, value)
    return problems


def _leave_out_excluded(document: Document, key: Key, value: Any) -> None:
    """Remove keys of the recipe that exclude the typed `key`: what is typed wins."""
    if key == ("lora",) and value is None:
        others = list(ADAPTERS_ONLY)
    else:
        others = [other for mine, other in EXCLUSIVE if mine == key and value]
    for other in others:
        held = _held(document.values, other)
        if other in document.overridden or held in (None, False, "auto", -1, 0):
            continue
        if other == ("compression", "preset") and held != "lora-cocktail":
            continue
        set_value(document.values, other, None)
        line = document.lines.pop(other)
        name, where = ".".join(map(str, other)), f"line {line} of {Path(document.file).name}"
        document.notes.append(f"{document.overridden[key]} is typed: {name} in {where} is left out")


def _held(values: Any, key: Key) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def parse_value(text: str) -> Any:
    """Parse the value of an override. Errors: ValueError with a text for the user."""
    try:
        _check_events(text, "override")
        return yaml.safe_load(text)
    except (yaml.YAMLError, OverflowError):
        raise ValueError(f"{text!r} is not a YAML value") from None
    except RecipeError as error:
        raise ValueError(error.problems[0].message) from None


def resolve(name: str, datasets: int = 0, extend: Extend = heart_alone) -> Key:
    """Resolve `learning_rate` or `training.learning_rate` to ("training", "learning_rate").

    A key of data sets is that of the only one. A typo passes: the check of the whole recipe suggests what was
    meant. Errors: ValueError where there are several data sets.
    """
    if "." not in name:
        found = bare_keys()
        if name not in found and name in Dataset.model_fields:
            if datasets == 1:
                return ("datasets", 0, name)
            raise ValueError(f"which data set? write datasets.0.{name}=...")
        if name not in found and name not in Recipe.model_fields:
            of_name = bare_keys(extend([name]))
            found = of_name if name in of_name else bare_keys(extend(None))
        return found.get(name, (name,))
    return tuple(int(part) if part.isdecimal() else part for part in name.split("."))


def set_value(values: dict[str, Any], key: Key, value: Any) -> None:
    """Set `key` and the sections above it; None removes it. Errors: ValueError where the path is wrong."""
    node: Any = values
    for depth, part in enumerate(key):
        last = depth == len(key) - 1
        above = ".".join(str(p) for p in key[:depth])
        if isinstance(node, list):
            if not isinstance(part, int) or part > len(node):
                raise ValueError(f"`{above}` is a list of {len(node)}; give an index up to that")
            if part == len(node):
                node.append({})
        elif isinstance(node, dict):
            part = str(part)
        else:
            raise ValueError(f"`{above}` holds a value, not keys")
        if last:
            if value is not None:
                node[part] = value
            elif isinstance(node, dict):
                node.pop(part, None)
            else:
                node.pop(int(part))
            return
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = [{}] if key[depth + 1] == 0 else {}
        node = node[part]


# ---- names of keys -----------------------------------------------------------------------------------------


def key_names(of: type[Recipe] = Recipe) -> list[str]:
    """List the names that an override takes without a path: `learning_rate`, and those of data sets."""
    return [*bare_keys(of), *(name for name in Dataset.model_fields if name not in bare_keys(of))]


def known_key(name: str, of: type[Recipe] = Recipe) -> bool:
    """True for the bare name of a key, a section, or a dotted path that begins with one."""
    return name in key_names(of) or name.partition(".")[0] in of.model_fields


def is_optional(key: Key, of: type[Recipe] = Recipe) -> bool:
    """True for the key of a section that a recipe need not have: `lora`."""
    return len(key) == 1 and key[0] in sections(of) and of.model_fields[str(key[0])].default is None


def is_switch(name: str, of: type[Recipe] = Recipe) -> bool:
    """True for the bare or dotted name of a key that may be true or false, or of an optional section."""
    full = bare_keys(of).get(name) or tuple(name.split("."))
    if is_optional(full, of):
        return True
    if len(full) != 2 or full[0] not in sections(of):
        return False
    field = sections(of)[str(full[0])].model_fields.get(str(full[1]))
    return field is not None and bool in (field.annotation, *get_args(field.annotation))
