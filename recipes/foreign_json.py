"""JSON that others have written: of a model's folder, a file's header, a row of data, another machine.

Everything is measured before it is parsed, so a text of a megabyte costs neither the stack nor gigabytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from .errors import ModelError

LFS_POINTER = b"version https://git-lfs"  # the beginning of what a clone without git-lfs has instead
MOST_LEVELS = 64  # of containers in containers; a tokenizer.json has about ten
MOST_CONTAINERS = 1 << 21  # an empty one takes 64 bytes; a tokenizer of 256,000 tokens has 600,000
MOST_VALUES = 1 << 22  # a number takes 32 bytes; such a tokenizer has 1,500,000
MOST_BYTES = 16 << 20  # of a file; a tokenizer_config.json has one MB
LARGE, MOST_LARGE = ("tokenizer.json", "vocab.json", "model.safetensors.index.json"), 256 << 20
PARSED = 4 << 20  # bytes of a file that is parsed to check it; of a larger one that takes a second
MOST_DIGITS = 4300  # of an integer, as Python allows
# it matches from each quote on, so no text makes it look twice at a byte
STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
OTHERS = bytes(set(range(256)) - set(b"[]{}"))
STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of data. Python drops all values but the last of a key. Errors: KeyError of one that
    comes twice."""
    if len(made := dict(pairs)) < len(pairs):
        raise KeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return made


def parse_json(text: str | bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON. Infinity and NaN pass, which configs of state-space models have. `hook` makes the objects,
    of data `unique_keys`.

    Errors: ValueError with what is wrong with it, one sentence.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_json(data)
    try:
        return json.loads(data.decode(), object_pairs_hook=hook)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{error.msg.removesuffix(' at')} at {line}column {error.colno}") from None
    except KeyError as error:
        raise ValueError(f"an object has the key `{error.args[0]}` twice") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 at byte {error.start}") from None
    except ValueError:
        raise ValueError(f"an integer of more than {MOST_DIGITS:,} digits") from None


def check_json(data: bytes) -> None:
    """Measure a text, without parsing it.

    Errors: ValueError where it is deeper than MOST_LEVELS, or has more than MOST_CONTAINERS or MOST_VALUES.
    """
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS and data.count(b",") <= MOST_VALUES:
        return  # as few with those in strings: a row of data, most often
    outside = STRING.sub(b"", data)
    if outside.count(b",") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    brackets = outside.translate(None, OTHERS)
    if len(brackets) > 2 * MOST_CONTAINERS:
        raise ValueError(f"more than {MOST_CONTAINERS:,} objects and lists")
    if max(accumulate(map(STEP.__getitem__, brackets)), default=0) > MOST_LEVELS:
        raise ValueError(f"nested deeper than {MOST_LEVELS} levels")


def most_bytes(name: str) -> int:
    """Return the most bytes of a JSON file of a model that has this name."""
    return MOST_LARGE if name in LARGE else MOST_BYTES


def check_json_file(path: Path) -> None:
    """Check a file that a library is to read: one object, as `check_json`. Errors: ValueError, OSError."""
    if (size := path.stat().st_size) > most_bytes(path.name):
        raise ValueError(f"{size:,} bytes, at most {most_bytes(path.name):,} are read")
    if size > PARSED:
        check_json(path.read_bytes())
    elif not isinstance(parse_json(path.read_bytes()), dict):
        raise ValueError("no object with names and values")


def parse_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Parse one JSON object. Errors: ModelError, which calls the text by this name."""
    hint = "(hint: copy it again from where the model comes from)"
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ModelError(f"{name} is not valid JSON: {error} {hint}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} holds no object with the model's settings")
    return value


def read_object(path: Path, name: str = "") -> dict[str, Any]:
    """Read a file with one JSON object. Errors: ModelError, which calls the file by this name."""
    try:
        return parse_object(path.read_bytes(), name or str(path))
    except OSError as error:
        raise ModelError(f"{name or path} cannot be read: {error.strerror}") from error
