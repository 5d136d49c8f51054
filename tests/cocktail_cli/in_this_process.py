"""The command line without a process of its own: importing torch once is enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """Output and exit status of a command."""

    exit: int
    out: str
    err: str


Run = Callable[..., Said]  # run("status", "--json")
