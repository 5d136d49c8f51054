"""Rows of measurements: files of JSON in scripts/measured, a line each, that RESULTS.md is made of."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts import ROOT
from scripts.swarms.lab import parser

FOLDER = ROOT / "scripts" / "measured"
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(path: Path, found: Row, same: Sequence[str]) -> None:
    """Write a row in the place of the older one of which these keys are the same."""
    older = [row for row in read(path) if any(row.get(key) != found.get(key) for key in same)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [*older, found]))


def options(doc: str | None, out: Path, **choices: Iterable[str]) -> argparse.ArgumentParser:
    """Options of a measurement whose cases are chosen by words, all unless told: --out, --list, --inside."""
    asked = parser(doc)
    for name, words in choices.items():
        known = list(words)
        asked.add_argument(f"--{name}", nargs="+", default=known, choices=known, metavar=name.upper())
    asked.add_argument("--out", type=Path, default=out)
    asked.add_argument("--list", action="store_true", help="print the choices")
    asked.add_argument("--inside", help=argparse.SUPPRESS)
    return asked
