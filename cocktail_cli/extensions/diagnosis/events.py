"""The event that names who makes rounds longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cocktail_cli.ui import events


@events.event
class Culprit(events.OfExtension):
    """A peer, or "the hub", lengthens rounds, and it is known why."""

    peer: str
    cause: str
    evidence: str  # what was measured
    remedy: str
    lengthened: float  # what share longer the round was
    round: int

    def sentence(self) -> str:
        return accusation(asdict(self))


def accusation(told: Mapping[str, Any]) -> str:
    """Say who lengthens rounds, why, and what helps: the fields of a `Culprit`."""
    longer = f"makes rounds {told['lengthened']:.0%} longer: " if told["lengthened"] else ""
    return f"{told['peer']} {longer}{told['cause']}, {told['evidence']}. Remedy: {told['remedy']}"
