"""Markdown of RESULTS.md: tables, paragraphs, dates."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from scripts.report.rows import Row

NOTHING = "Not measured yet.\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def prose(*words: str) -> str:
    """Fill a paragraph, or (the first begins with "- ") one point of a list each."""
    joined = [" ".join(word.split()) for word in words]
    if joined[0].startswith("- "):
        return "\n".join(textwrap.fill(word, 110, subsequent_indent="  ") for word in joined) + "\n"
    return textwrap.fill(" ".join(joined), 110) + "\n"


def dates(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row["date"] for row in rows if "date" in row})) or "never"
