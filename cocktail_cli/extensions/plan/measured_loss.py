"""Held-out loss beyond that of all-reduce, as the quality study has measured it, and what it has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.config import Compression


@dataclass(frozen=True)
class Row:
    """Rows of the study, each at its best learning rate beside all-reduce at its own."""

    parameters: float
    steps: int
    over: dict[int, float]  # number of peers -> share by which the loss is higher


STUDY = 132_864, 1600  # parameters, steps
MEASURED = {  # by preset; a test compares them with the study's cells
    "cocktail": Row(*STUDY, {4: 0.0018, 8: 0.0141}),
    "cocktail-paper": Row(*STUDY, {4: 0.0318}),
    "cocktail-wide": Row(*STUDY, {4: 0.0009}),
    "cocktail-thin": Row(*STUDY, {4: 0.0132}),
    "lora-cocktail": Row(16_384, 400, {4: 0.0012, 8: 0.0023}),
}


@dataclass(frozen=True)
class Expected:
    """The row that is nearest to a run."""

    over: float  # share by which the loss is higher than that of all-reduce
    peers: int  # with which that was measured
    beyond: tuple[str, ...]  # in what the run lies outside of the rows, for people


def expected_loss(
    method: Compression, adapters: bool, parameters: int, peers: int, steps: int | None
) -> Expected | None:
    """Find the loss that a method was measured with; None: it was not."""
    name = next((name for name in MEASURED if same_method(method, adapters, name)), "")
    if not name:
        return None
    row = MEASURED[name]
    nearest = min((count for count in row.over if count >= peers), default=max(row.over))

    def outside() -> Iterator[str]:
        if nearest < peers:
            yield f"more than {nearest} peers"
        if parameters > 10 * row.parameters:
            yield f"more than {row.parameters:,.0f} trained parameters"
        if steps is not None and steps < row.steps:
            yield f"fewer than {row.steps:,} steps"

    return Expected(row.over[nearest], nearest, tuple(outside()))


def same_method(method: Compression, adapters: bool, name: str) -> bool:
    """Tell whether this is the method of a preset, and trains what the preset's row trained."""
    from recipes.config import CHOSEN, Compression

    preset, keys = Compression(preset=name), (*CHOSEN, "outer_learning_rate", "outer_momentum")
    of_adapters = name == "lora-cocktail"
    return adapters == of_adapters and all(getattr(method, key) == getattr(preset, key) for key in keys)
