"""The names of keys, as other commands and tools write them."""

from __future__ import annotations

from typing import get_args

from .document import bare_keys, sections
from .schema import Dataset, Recipe


def key_names(of: type[Recipe] = Recipe) -> list[str]:
    """List the names that an override takes without a path: `learning_rate`, and those of data sets."""
    return [*bare_keys(of), *(name for name in Dataset.model_fields if name not in bare_keys(of))]


def known_key(name: str, of: type[Recipe] = Recipe) -> bool:
    """True for the bare name of a key, a section, or a dotted path that begins with one."""
    first = name.partition(".")[0]
    return name in key_names(of) or first in of.model_fields


def is_switch(name: str, of: type[Recipe] = Recipe) -> bool:
    """True for the bare or dotted name of a key that may be true or false."""
    full = bare_keys(of).get(name) or tuple(name.split("."))
    if len(full) != 2 or full[0] not in sections(of):
        return False
    field = sections(of)[str(full[0])].model_fields.get(str(full[1]))
    return field is not None and bool in (field.annotation, *get_args(field.annotation))
