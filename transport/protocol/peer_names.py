"""Names of peers: any script, safe to print. What a file is called after one is the file's concern."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator

MOST = 40  # characters of a name
MARKS = 3  # combining marks in a row; more would climb over the lines above
WITHOUT_NAME = "peer"


def clean_name(name: str) -> str:
    """Make a wanted name safe to print and to sort by: letters, digits, `.`, `_`, `-`, composed (NFKC).

    Other characters become dashes. Formatting characters, such as bidi marks, are dropped: they would change
    how the text beside them reads.
    """
    composed = unicodedata.normalize("NFKC", name[: 4 * MOST])  # the rest could only cost time
    words = "".join(safe_characters(composed)).split()
    name = unicodedata.normalize("NFC", "-".join(words))  # what was dropped may have stood between
    return name[:MOST].strip("-.") or WITHOUT_NAME


def safe_characters(text: str) -> Iterator[str]:
    """Yield the characters that a name keeps, and a space for each that separates its words."""
    marks = MARKS  # a mark without a letter before it is dropped
    for character in text:
        kind = unicodedata.category(character)
        if kind[0] == "M":
            marks += 1
            if marks <= MARKS:
                yield character
        elif kind[0] in "LN" or character in "._-":
            marks = 0 if kind[0] in "LN" else MARKS
            yield character
        elif kind != "Cf":
            marks = MARKS
            yield " "


def unique_name(name: str, taken: Iterable[str]) -> str:
    """Return the name, or the first of name-2, name-3, ... that is not taken."""
    taken = set(taken)
    return next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}-{i}") not in taken)


def hash_of_names(names: Iterable[str]) -> str:
    """Return 16 hex digits that stand for these names, in whatever order."""
    return hashlib.sha256("\0".join(sorted(names)).encode()).hexdigest()[:16]
