"""Rows of measurements that RESULTS.md is made of: files of JSON, a line each, in scripts/measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().with_suffix("")
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(path: Path, found: Row, same: Sequence[str]) -> None:
    """In the place of the older row of which these keys are the same."""
    older = [row for row in read(path) if any(row[key] != found[key] for key in same)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [*older, found]))
