"""Figures of a diagnosis in a hub's status, and where people read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from cocktail_cli.assembly import PageBlocks, PagePart
from cocktail_cli.ui import counted
from transport.protocol import messages

from .events import Culprit, accusation
from .slowest_line import HUBS

SLOW = 400  # culprits that a page remembers; the oldest are dropped first
ROWS = 50  # of its table
HEAD = ("peer", "cause", "evidence", "remedy", "longer", "round")


class SlowestLineRow(msgspec.Struct):
    """The line that bounds the last rounds."""

    line: str
    waiting: messages.Finite
    bytes_per_s: messages.Finite


class CulpritRow(msgspec.Struct):
    """A peer that lengthens rounds."""

    peer: str
    cause: str
    evidence: str
    remedy: str
    lengthened: messages.Finite
    round: messages.Count
    since: messages.Count


class Figures(msgspec.Struct):
    """Fields of a status."""

    bottleneck: SlowestLineRow | None = None
    culprits: list[CulpritRow] = []


def bottleneck_line(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the line of `cocktail status` on what bounds the last rounds."""
    if slowest := status.get("bottleneck"):
        waiting = f"devices wait {slowest['waiting']:.0%} of the time for their exchange"
        yield f"bottleneck: {slowest['line']} ({waiting})"


def hubs_line(status: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes a second of one peer on the hub's line, up and down; 0: it bounds no rounds."""
    slowest = status.get("bottleneck") or {}
    rate, line = slowest.get("bytes_per_s", 0.0), slowest.get("line")
    return rate * (line == f"{HUBS} up"), rate * (line == f"{HUBS} down")


@dataclass(frozen=True)
class Known:
    """Slow rounds, as far as a page knows of them."""

    bottleneck: str = ""
    slow: Mapping[tuple[str, str, int], Culprit] = field(default_factory=dict)  # the newest figures of each


class SlowRoundsOnPage(PagePart):
    """Figure, sentences and table of a run's page."""

    def heard(self, known: Known | None, event: Mapping[str, Any]) -> Known:
        known = known or Known()
        if event["event"] == "culprit":
            return self._named(known, event, event["round"])
        return replace(known, bottleneck=event.get("bottleneck", "")) if event["event"] == "step" else known

    def answered(self, known: Known | None, status: Mapping[str, Any]) -> Known:
        known = known or Known()
        for one in status.get("culprits", ()):
            known = self._named(known, one, one["since"])
        return replace(known, bottleneck=(status.get("bottleneck") or {}).get("line", ""))

    def _named(self, known: Known, told: Mapping[str, Any], since: int) -> Known:
        """Add a culprit, of an event or of a hub's answer."""
        said = {key: str(told[key]) for key in ("peer", "cause", "evidence", "remedy")}
        one = Culprit(**said, lengthened=told["lengthened"], round=told["round"])
        slow = [*known.slow.items()][-SLOW:]
        return replace(known, slow=dict(slow) | {(one.peer, one.cause, since): one})

    def show(self, known: Known | None) -> PageBlocks:
        known = known or Known()
        slow, words = [*known.slow.values()], list[str]()
        if known.bottleneck:
            words.append(f"The bottleneck of the newest rounds is {known.bottleneck}.")
        for one in slow[-1:]:
            words.append(
                f"Newest of {counted(len(slow), 'finding')} on slow rounds: {accusation(asdict(one))}."
            )
        rows = [
            [one.peer, one.cause, one.evidence, one.remedy, f"{one.lengthened:.0%}", f"{one.round:,}"]
            for one in slow[: -ROWS - 1 : -1]
        ]
        table = {"title": "Who has made rounds longer, newest first", "head": HEAD, "rows": rows}
        sections = {"Slow rounds": [("table", table)]} if rows else {}
        return PageBlocks({"bottleneck": known.bottleneck or "-"}, words, sections)
