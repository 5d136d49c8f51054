"""The cells of the quality study, and the file of those that are done."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.study.train import COMPRESSION, TRAINING, Outcome, Setting, Size


@dataclass(frozen=True)
class Cell:
    """One training run."""

    setting: Setting
    rate: float
    seed: int


Found = Mapping[Cell, Outcome]
NAMES = {field.name for field in fields(Setting)}
# of recipes; `momentum` is the aggregator's
OF_RECIPES = COMPRESSION | {key: name for key, name in TRAINING.items() if key != "momentum"}
VALUES = {"packets": "0", "true": "1", "false": "0"}  # of a recipe -> of a setting


def changed(setting: Setting) -> dict[str, Any]:
    """Find what differs from the defaults: a setting as the file has it."""
    values = {f.name: (getattr(setting, f.name), f.default) for f in fields(setting)}
    return {name: value for name, (value, default) in values.items() if value != default}


def setting_text(setting: Setting) -> str:
    """Write what differs from the defaults as `keep=0.05,bits=2`, for `setting_of`."""
    return ",".join(f"{name}={value}" for name, value in changed(setting).items())


def setting_of(text: str) -> Setting:
    """Parse `keep=0.05,bits=2`, or with the names of recipes. Errors: ArgumentTypeError."""
    given = dict[str, Any]()
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        name = OF_RECIPES.get(key, key)
        try:
            given[name] = type(getattr(Setting, name))(VALUES.get(value, value))
        except (ValueError, AttributeError, TypeError):
            known = ", ".join([*(f.name for f in fields(Setting)), *OF_RECIPES])
            raise ArgumentTypeError(f"{part!r}: expected one of {known}, and a value") from None
    return Setting(**given)


def read(path: Path, size: Size, cut: bool = False) -> dict[Cell, Outcome]:
    """Read the cells of this size that are in the file: those that ended, or those that were cut short."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = json.loads(line)
        # older lines have settings that are gone
        known = one["size"] == size.name and one["setting"].keys() <= NAMES
        if known and (one["outcome"].get("done", 1.0) < 1) == cut:
            cell = Cell(Setting(**one["setting"]), one["rate"], one["seed"])
            listed = {name: tuple(value) for name, value in one["outcome"].items() if isinstance(value, list)}
            found[cell] = Outcome(**one["outcome"] | listed)
    return found


def shipped(size: Size) -> dict[Cell, Outcome]:
    """Read the cells of this size that the tables of README and RESULTS.md are of."""
    files = ROOT / "recipes" / "quality.jsonl", ROOT / "scripts" / "measured" / "quality.jsonl"
    return {cell: outcome for path in files for cell, outcome in read(path, size).items()}


def rounded_to(digits: int, value: Any) -> Any:
    if isinstance(value, tuple):
        return [rounded_to(digits, one) for one in value]
    return round(value, digits) if isinstance(value, float) else value


def write(path: Path, size: Size, cell: Cell, outcome: Outcome) -> None:
    """Append a cell to the file; it takes the place of an older row that was cut short."""
    usual = {field.name: field.default for field in fields(Outcome)}
    told = {name: value for name, value in asdict(outcome).items() if value != usual[name]}
    rounded = {name: rounded_to(5, value) for name, value in told.items()}
    one = {"size": size.name, "setting": changed(cell.setting), "rate": cell.rate, "seed": cell.seed}
    if cell in read(path, size, cut=True):
        lines = path.read_text().splitlines(keepends=True)
        others = (line for line in lines if json.loads(line) | one != json.loads(line))
        path.write_text("".join(others))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**one, "outcome": rounded}) + "\n")


def cells(settings: Iterable[Setting], rates: Iterable[float], seeds: Iterable[int]) -> list[Cell]:
    return [Cell(s, rate, seed) for seed in seeds for s in settings for rate in rates]
