"""Markdown of RESULTS.md: tables, dates, and results_template.txt with its values filled in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from scripts.report.rows import Row

NOTHING = "Not measured yet.\n"
SECTIONS = {  # name -> title, text
    name: (title, text)
    for name, title, text in re.findall(
        r"^## (\w+): (.*?)\n\n(.*?)(?=\n## |\Z)",
        Path(__file__).with_name("results_template.txt").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}


def commands(name: str) -> list[str]:
    """List the commands that measure a section again."""
    return [line.strip() for line in SECTIONS[name][1].splitlines() if line.startswith("    ")]


def section(name: str, **values: object) -> str:
    """Fill the values into a section's blocks below its commands; a block that is then empty is left out."""
    made = []
    for block in SECTIONS[name][1].strip("\n").split("\n\n"):
        if re.fullmatch(r"\{\w+\}", block):
            made.append(str(values[block[1:-1]]))
        elif not block.startswith("    "):
            made.append(paragraph(block.format(**values)))
    return "\n".join(block for block in made if block)


def paragraph(text: str) -> str:
    """Fill a paragraph, or each point of a list."""
    points, indent = re.split(r"\n(?=- )", text), "  " if text.startswith("- ") else ""
    return "".join(textwrap.fill(" ".join(p.split()), 110, subsequent_indent=indent) + "\n" for p in points)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def dates(rows: Sequence[Row]) -> str:
    """Return the first and the last day on which these rows were measured."""
    days = sorted({row["date"] for row in rows if "date" in row})
    return " to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "never"
