"""Errors of a recipe, its data or its model, with texts that say how to fix them.

All are faults of the user's input, not bugs, so they are one family, `InputError`. A caller that reports
errors needs only that name and `HubUnreachable`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal


class InputError(Exception):
    """The recipe, its data or its model cannot be used."""


class DataError(InputError):
    """The data set cannot be used. The message names file and line where there is one.

    Args:
        hint: what to do about it.
        columns: of a row whose type they do not tell, after renaming.
    """

    def __init__(self, message: str, hint: str = "", columns: Collection[str] = ()) -> None:
        super().__init__(message)
        self.hint, self.columns = hint, columns


class ForeignSamples(DataError):
    """Samples that came from a hub are none, or none that its run can have."""


class ForeignPacket(Exception):
    """A packet that came from a hub is none that its run can have."""


class ModelError(InputError):
    """The model cannot be used. The message names the folder or hub id, and what is missing.

    Args:
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hints: tuple[str, ...] = (hint,) if hint else ()


class MissingPackage(ModelError):
    """A library that the recipe needs is not installed, or does not load.

    Args:
        package: its name on PyPI.
        hints: what to do without it.
    """

    def __init__(self, message: str, package: str, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.package, self.hints = package, hints


class HubUnreachable(Exception):
    """The Hugging Face hub did not answer, so a hub id could not be fetched."""


class PartLost(Exception):
    """A machine that has a part of this peer is gone, or was started again. The peer joins anew."""


@dataclass(frozen=True)
class Problem:
    """One fault of a recipe, and where it is written."""

    file: str  # path of the recipe, or "override" for a key=value of the command line
    line: int | None  # 1-based; None where there is no line (overrides, files that do not open)
    key: str  # dotted path, "" for the file as a whole
    message: str
    hint: str = ""  # what to type instead

    @property
    def place(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


def problem_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Format problems as lines, in columns: place, key, and the message with its hint."""
    places = max((len(p.place) for p in problems), default=0)
    keys = max((len(p.key) for p in problems), default=0)
    for p in problems:
        said = f"{p.message} ({p.hint})" if p.hint else p.message
        columns = [p.place.ljust(places), p.key.ljust(keys), said]
        yield "  " + "  ".join(column for column in columns if column.strip())


class RecipeError(InputError):
    """The recipe is not valid. `problems` has all faults, by line; `source`: whose they are."""

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        order = sorted(problems, key=lambda p: (p.line is None, p.line or 0))
        self.problems: list[Problem] = list(order)
        by_hand = all(p.file == "override" for p in problems)
        self.source = "the command line" if by_hand else source or problems[0].file
        super().__init__(str(self))

    def __str__(self) -> str:
        count = len(self.problems)
        first = f"{self.source} has {count} problem{'s' if count != 1 else ''}"
        return "\n".join([first, *problem_lines(self.problems)])


@dataclass(frozen=True)
class Finding:
    """Result of one check, for the user; `error`: the exception of a failed check, if any."""

    level: Literal["ok", "warn", "fail"]
    about: str  # recipe, model, data, gpu, disk, ...
    text: str
    hint: str = ""  # what to do about it
    error: Exception | None = None
