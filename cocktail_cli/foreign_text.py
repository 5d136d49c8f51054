"""Text that others have written, made safe to show: names, reasons, addresses, licences, a model's words.

A terminal obeys control characters: it fills the clipboard, changes its title, draws over other lines. Marks
that no eye sees change how the text beside them reads, and make two names look the same. So:

- what ends a line, and every kind of blank, becomes a space; other control characters, halves of characters
  and private ones become `?`;
- what is invisible is dropped: bidi marks, joiners, variation selectors, soft hyphens, tags, fillers. Letters
  of any script, their marks, and emoji stay readable; a joined emoji becomes its parts;
- of combining marks at most three follow a letter, as more would climb over the lines above.

Nothing else in this program decides what may be shown. `ui/output.py` calls it for all that it prints.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

T = TypeVar("T")
LONGEST = 2000  # characters of a line that others have a part in
MOST_MARKS = 3  # in a row
# Default_Ignorable_Code_Point of Unicode 16, but for characters of category Cf, which are dropped as such
RANGES = (
    (0x34F, 0x34F),
    (0x115F, 0x1160),  # Hangul fillers
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),  # Mongolian variation selectors
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),  # variation selectors
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0xE0000, 0xE0FFF),  # tags, further variation selectors
)
INVISIBLE = frozenset(code for first, last in RANGES for code in range(first, last + 1))
BLANKS = frozenset([0x2800, 0x1D159])  # that are no blanks by their category: of Braille, of notes
UNCLEAR = ("Cc", "Cs", "Co")  # control characters, halves, private ones
NONE = range(0xFDD0, 0xFDF0)  # code points that are no characters, as are the last two of each plane
MARKS = ("Mn", "Mc", "Me")
FLOOD = re.compile(rf"[^\x00-\u02ff]{{{MOST_MARKS + 1},}}")  # where there may be too many marks


def one_line(text: str, limit: int | None = LONGEST) -> str:
    """Make a text safe to show on one line, and cut it at so many characters. It stays as it is if it is."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return fewer_marks("".join(map(shown, text)))


def paragraphs(text: str) -> str:
    """Make a text of several lines safe to show: its line feeds and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    rows = (line.split("\t") for line in text.replace("\r\n", "\n").split("\n"))
    return "\n".join("\t".join(one_line(cell, None) for cell in row) for row in rows)


def readable(value: T, safe: Callable[[str], str] = one_line) -> T:
    """Make every text in a value of JSON safe to show, keys included: by `one_line` or `paragraphs`."""
    made: Any = value
    if isinstance(value, str):
        made = safe(value)
    elif isinstance(value, Mapping):
        made = {readable(key, safe): readable(inner, safe) for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        made = type(value)(readable(inner, safe) for inner in value)
    return cast("T", made)


@lru_cache(4096)
def shown(character: str) -> str:
    """Return what stands for a character: itself, a space, `?` or nothing."""
    code, kind = ord(character), unicodedata.category(character)
    if character.isspace() or code in BLANKS:  # Zs, Zl, Zp, and the control characters that part lines
        return " "
    if kind == "Cf" or code in INVISIBLE:
        return ""
    return "?" if kind in UNCLEAR or code in NONE or code & 0xFFFE == 0xFFFE else character


def fewer_marks(text: str) -> str:
    """Drop combining marks beyond three in a row, and those with nothing before them."""
    if not FLOOD.search(text) and not unicodedata.category(text[:1] or "x").startswith("M"):
        return text
    kept, marks = [], MOST_MARKS
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in MARKS else 0
        if marks <= MOST_MARKS:
            kept.append(character)
    return "".join(kept)
