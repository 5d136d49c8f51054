"""A soak in parts: each is a run under faults, and a line of a file; a part that was cut off does not count.

Parts differ in seed, and in turn in durability and in who aggregates. The soak goes on where the file ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]

ASYNCHRONOUS, REPLICATED = {"replicated": False, "owners": False}, {"replicated": True, "owners": False}
AGGREGATING = {"replicated": False, "owners": True}  # such a run has no standby, and fewer peers
WAYS = (ASYNCHRONOUS, REPLICATED, AGGREGATING, ASYNCHRONOUS, REPLICATED)


def read_rows(path: Path) -> list[Row]:
    """Read the parts that are over."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def soak(path: Path, least: int, play: Callable[[int, Row], Row], ways: Sequence[Row] = WAYS) -> bool:
    """Play parts until there are so many faults; True where every promise was kept.

    Args:
        play: makes a part with this number, in this way, and returns its row.
        ways: taken in turn.
    """
    rows = read_rows(path)
    while sum(sum(row["faults"].values()) for row in rows) < least:
        rows.append(play(len(rows) + 1, dict(ways[len(rows) % len(ways)])))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print("\n".join(totals(rows)), flush=True)
    return not any(row["broken"] for row in rows)


def totals(rows: Sequence[Row]) -> list[str]:
    """Add up the parts, for a person."""
    faults: Counter[str] = sum((Counter(row["faults"]) for row in rows), Counter())
    kinds = ", ".join(f"{kind} {count}" for kind, count in faults.most_common())
    said = [f"{len(rows)} parts, {faults.total():,} faults: {kinds}"]
    said.append(f"{sum(row['samples'] for row in rows):,} samples of runs that counted each of them once")
    for way in ("asynchronous", "replicated"):
        lost = [row for row in rows if row["replicated"] == (way == "replicated")]
        gaps, rounds = sorted(gap for row in lost for gap in row["gaps_s"]), sum(row["lost"] for row in lost)
        said.append(f"{way}: {len(gaps)} hubs lost with their disk, {rounds} committed rounds with them")
        if gaps:
            said[-1] += f"; gap {median(gaps):.1f} s, at most {gaps[-1]:.1f} s"
    peaks = {
        name: [row["peak_mb"][name] for row in rows if name in row["peak_mb"]] for name in ("hub", "ann")
    }
    for name, seen in peaks.items():
        if seen:
            said.append(f"peak of {name}: {seen[0]} MB, in the last part {seen[-1]}, at most {max(seen)}")
    said += [f"NOT SO in part {row['part']}: {broken}" for row in rows for broken in row["broken"]]
    return said
