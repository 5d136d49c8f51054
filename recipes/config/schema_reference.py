"""Describe every key of a recipe: its type, its default, its meaning. All of it is read from the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from recipes.errors import RecipeError

from .checks import unknown_key
from .document import Document, bare_keys
from .schema import Dataset, Recipe, Section

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
