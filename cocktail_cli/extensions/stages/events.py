"""The event that tells which machines have which layers, and how people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cocktail_cli.assembly import PageBlocks, PagePart
from cocktail_cli.ui import events


@events.event
class Stages(events.OfExtension):
    """Which machines that lend memory have which layers, after each change."""

    rings: list[list[dict[str, Any]]]  # peers; of each its machines by stage: name (null: lost), layers
    waiting: list[str]  # machines that no peer has a place for

    def sentence(self) -> str:
        return "; ".join(stage_lines(vars(self))) or "no machine lends memory now"


def stage_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """Say which machines are a peer together, each with its layers, and which wait: fields of a `Stages`."""
    for ring in told["rings"]:
        machines = [
            f"{one.get('name') or 'nobody'} ({layers_text(one.get('layers', (0, 0)))})" for one in ring
        ]
        yield f"stages: {', '.join(machines)}"
    if told["waiting"]:
        yield f"waiting for a place: {', '.join(told['waiting'])}"


class StagesOnPage(PagePart):
    """Sentences of a run's page, while machines lend memory to it."""

    def heard(self, known: Sequence[str] | None, event: Mapping[str, Any]) -> Sequence[str] | None:
        if event["event"] in ("run_finished", "run_paused"):
            return None
        return [*stage_lines(event)] if event["event"] == "stages" else known

    def answered(self, known: Sequence[str] | None, status: Mapping[str, Any]) -> Sequence[str] | None:
        return [*stage_lines(status["stages"])] if status.get("stages") else None

    def show(self, known: Sequence[str] | None) -> PageBlocks:
        return PageBlocks(words=[f"{line[0].upper()}{line[1:]}." for line in known or ()])


def layers_text(layers: Sequence[int]) -> str:
    """Name the layers first .. stop-1 of a machine; the first one may have none."""
    first, stop = layers
    if stop - first < 2:
        return f"layer {first}" if stop > first else "no layer"
    return f"layers {first} to {stop - 1}"
