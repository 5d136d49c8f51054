"""Diagnosis of slow rounds: which peer lengthens them, and why; which line bounds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, HostParts, PageBlocks, PagePart, PeerExtension, PeerParts
from cocktail_cli.ui import counted

from .bodies import Culprit, Figures, accusation

if TYPE_CHECKING:
    from transport.hub import Extend

SLOW = 400  # culprits that a page remembers; the oldest are dropped first
ROWS = 50  # of its table
HEAD = ("peer", "cause", "evidence", "remedy", "longer", "round")


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


class Diagnosis(Extension):
    """Peers measure how they spend their time, and the hub names who makes rounds longer."""

    def hub(self, host: HostParts) -> Extend:
        from .hub import Diagnostician

        return Diagnostician

    def peer(self, peer: PeerParts) -> PeerExtension:
        from .peer import TimeKeeper

        return TimeKeeper(peer.recipe.compression.staleness, peer.devices)

    def events(self) -> tuple[type[Any], ...]:
        return (Culprit,)

    def figures(self) -> type[Figures]:
        return Figures

    def above_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        if slowest := status.get("bottleneck"):
            waiting = f"devices wait {slowest['waiting']:.0%} of the time for their exchange"
            yield f"bottleneck: {slowest['line']} ({waiting})"

    def below_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        yield from map(accusation, status.get("culprits", ()))

    def hubs_line(self, status: Mapping[str, Any]) -> tuple[float, float]:
        slowest = status.get("bottleneck") or {}
        rate, line = slowest.get("bytes_per_s", 0.0), slowest.get("line")
        return rate * (line == "the hub's up"), rate * (line == "the hub's down")

    def page(self) -> PagePart:
        return SlowRoundsOnPage()


extension = Diagnosis()
