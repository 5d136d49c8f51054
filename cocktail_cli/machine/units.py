"""Rates and sizes as people write them: `20mbit`, `500kbit`, `2MB/s`, `20GiB`."""

from __future__ import annotations

import re

import typer

# Bits in any case, as `tc` and providers write them; bytes with a capital B and a time: 2mb could be either.
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmg]?)bits?(?:/s)?|([kmg]?)B/s)", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_LOWEST = 1000.0  # bytes a second: below, pings and messages alone would fill it


def parse_rate(text: str) -> float:
    """Parse a rate into bytes a second. Raises typer.BadParameter, a usage error (exit 2)."""
    match = _RATE.fullmatch(text.strip())
    if match is None or (match[3] is not None and "B" not in text):
        raise typer.BadParameter(f"{text!r} is not a rate; write 20mbit, 500kbit or 2MB/s")
    number, bits, size = match.groups()
    rate = float(number) * _SCALE[(bits if size is None else size).lower()] / (8 if size is None else 1)
    if rate < _LOWEST:
        raise typer.BadParameter(f"{text!r} is too slow for a run; at least 8kbit")
    return rate


def rate_text(rate: float) -> str:
    """Format a rate so that `parse_rate` reads it."""
    return f"{rate:.0f}B/s"


def parse_size(text: str) -> int:
    """Parse `20GiB` or `80GB` into bytes. Raises typer.BadParameter."""
    from recipes.config import parse_size

    try:
        return int(parse_size(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
