"""Every key of a recipe in words: its type, its default, and what schema.py says beside it.

Nothing is written twice: types are those of the JSON schema that pydantic makes, meanings the comments.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from recipes.errors import RecipeError

from .checks import unknown
from .document import Document, bare_keys
from .schema import Dataset, Recipe, Section

TYPES = {"integer": "whole number", "string": "text", "boolean": "true | false", "object": "mapping"}
LIMITS = {  # JSON schema's word -> ours
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}
HIDDEN = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


@dataclass(frozen=True)
class KeyDescription:
    """One key as one reads it."""

    key: str  # dotted, as an override takes it
    default: str  # as YAML takes it, or "required"
    type: str
    meaning: str  # "" where schema.py says no more


@dataclass(frozen=True)
class Place:
    """A section, or one field of it."""

    above: str  # dotted key of the section, "" for the recipe itself
    section: type[Section]
    field: str | None = None


def describe_keys(name: str = "") -> list[KeyDescription]:
    """The keys of the section `name`, the field `name`, or (nothing given) all. Errors: RecipeError."""
    place = find(name)
    found = walk(place.section, f"{place.above}." if place.above else "", set())
    wanted = f"{place.above}.{place.field}".lstrip(".") if place.field else None
    return [row for row in found if wanted in (None, row.key)]


def json_schema(name: str = "") -> dict[str, Any]:
    """The same for programs: JSON schema. Errors: RecipeError."""
    place = find(name)
    schema = place.section.model_json_schema()
    return dict(schema["properties"][place.field]) if place.field else schema


def find(name: str) -> Place:
    """A section by its name, a field by its dotted or bare name. Errors: RecipeError with what was meant."""
    place, parts = Place("", Recipe), tuple(part for part in name.split(".") if part and not part.isdecimal())
    if len(parts) == 1 and parts[0] in Dataset.model_fields and parts[0] not in bare_keys():
        parts = ("datasets", *parts)
    elif len(parts) == 1:
        parts = tuple(map(str, bare_keys().get(parts[0], parts)))
    for part in parts:
        field = place.section.model_fields.get(part) if place.field is None else None
        if field is None:
            asked = Document("schema.py", {}, overridden={parts: name})
            raise RecipeError([unknown(asked, parts)])
        inner, many = section_in(field.annotation)
        above = f"{place.above}.{part}".lstrip(".") + (".0" if many else "")
        place = Place(above, inner) if inner else Place(place.above, place.section, part)
    return place


def walk(section: type[Section], above: str, seen: set[type[Section]]) -> Iterator[KeyDescription]:
    """The keys of a section and of those inside it; one that stands at two places is told at the first."""
    seen.add(section)
    said, properties = meanings(section), section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        inner, many = section_in(field.annotation)
        if inner is not field.annotation:  # a section that is always there says nothing by itself
            default = "required" if field.is_required() else as_yaml(field.get_default())
            typed = kind(properties[name] | limits_of(field))
            yield KeyDescription(f"{above}{name}", default, typed, said.get(name, ""))
        if inner and inner not in seen:
            yield from walk(inner, f"{above}{name}.0." if many else f"{above}{name}.", seen)


def section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a field holds, and whether it is a list of them."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, Section):
            return part, Ellipsis in get_args(annotation)
    return None, False


def meanings(section: type[Section]) -> dict[str, str]:
    """Field -> the comments above it and beside its default."""
    text = inspect.getsource(section)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    [body] = ast.parse(text).body
    assert isinstance(body, ast.ClassDef)
    found, before = {}, body.lineno
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = (node.value or node.annotation).lineno
            lines = (*range(before + 1, node.lineno), *range(beside, (node.end_lineno or beside) + 1))
            found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
        before = node.end_lineno or before
    return found


def limits_of(field: FieldInfo) -> dict[str, Any]:
    """Limits behind a validator of ours, which pydantic leaves out of the JSON schema."""
    return {
        name: getattr(limit, word)
        for limit in field.metadata
        for word, name in HIDDEN.items()
        if hasattr(limit, word)
    }


def kind(schema: dict[str, Any]) -> str:
    """A type of the JSON schema in words."""
    if "description" in schema:
        return str(schema["description"])
    if "$ref" in schema:
        return "section"
    if "anyOf" in schema:
        return " | ".join(kind(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema["type"] == "array":
        return f"list: {kind(schema['items'])}"
    limits = [f"{word} {as_yaml(schema[name])}" for name, word in LIMITS.items() if name in schema]
    return ", ".join([TYPES.get(schema["type"], schema["type"]), *limits])


def as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
