"""Names of objects and of peers. Of objects: how those that peers upload are written, and the table of those
that they fetch.

A row of the table has the form of a name, whose sessions may fetch it, its size, and what that costs the hub.
PROTOCOL.md has the same table for people; a test compares the two. A name that matches no row of a hub's
table is not served, and nothing of it is stored. Rows of what a run does not use are not in the table of its
hub.

Of peers: any script, safe to print. What a file is called after one is the file's concern.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

NUMBER = "[0-9]{1,18}"
PLACES = {  # what stands for a part of a name -> the pattern of that part
    "<round>": NUMBER,
    "<a>": NUMBER,
    "<b>": NUMBER,
    "<link>": NUMBER,
    "<number>": NUMBER,
    "<stamp>": "[0-9]{1,20}",  # nanoseconds since 1970
    "<shards>": "[0-9]{1,9}-[0-9]{1,9}(?:,[0-9]{1,9}-[0-9]{1,9})*",
    "<file>": "[^/]+",
    "<peer>": "[^/]+",
    "<object>": ".+",
    "<path>": ".+",
}


class Cost(Enum):
    """The hub's cost of an object. Reading for rounds goes before all other reading."""

    ROUND = "members wait for it: read first"
    READ = "read from a file"


@dataclass(frozen=True)
class ObjectKind:
    """A row of the table: objects that peers fetch."""

    form: str  # of the name: "packets/<a>-<b>"
    readers: tuple[str, ...]  # roles of the sessions that may fetch it; none: of all
    largest: str  # its size at most, as a peer that fetches it knows beforehand
    cost: Cost
    pattern: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", pattern_of(self.form))

    @property
    def prefix(self) -> str:
        """Return the first part of the name, which tells most rows apart."""
        return self.form.partition("/")[0]

    def parts(self, name: str) -> tuple[str, ...] | None:
        """Return what stands in the places of the form; None where the name is of another form."""
        found = self.pattern.fullmatch(name)
        return None if found is None else found.groups()


def pattern_of(form: str) -> re.Pattern[str]:
    """Return the pattern of names of this form; its groups are what stands in the places."""
    parts = re.split("(<[a-z]+>)", form)
    pattern = "".join(f"({PLACES[part]})" if part in PLACES else re.escape(part) for part in parts)
    return re.compile(pattern, re.ASCII)


# ---- names of uploaded objects ---------------------------------------------------------------------------

UPDATE, HANDOFF = "update/", "handoff/"  # each followed by a round
PACKET = "packet/"  # followed by a round: its aggregate
TRIAL = "trial/"  # followed by a number that the peer chooses


def round_of(prefix: str, name: str) -> int | None:
    """Parse the number in "update/17"; None for another name."""
    digits = name.removeprefix(prefix)
    plain = name.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19
    return int(digits) if plain else None


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
