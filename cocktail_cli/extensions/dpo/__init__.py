"""DPO: adapters learn from pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cocktail_cli.assembly import Extension, PageBlocks, PagePart

MOST = 20_000  # rounds, and evaluations, that a page remembers; the oldest are dropped first
Known = Mapping[str, tuple[tuple[int, Mapping[str, float]], ...]]  # event -> step and rewards of each


class RewardsOnPage(PagePart):
    """Curves of rewards, and of the share of pairs whose chosen answer has more."""

    def heard(self, known: Known | None, event: Mapping[str, Any]) -> Known | None:
        if not (rewards := event.get("rewards")):
            return known
        known, kind = known or {}, event["event"]
        return {**known, kind: (*known.get(kind, ())[-MOST:], (event["step"], rewards))}

    def show(self, known: Known | None) -> PageBlocks:
        def of(name: str, kind: str) -> list[tuple[float, float]]:
            return [(step, rewards[f"rewards/{name}"]) for step, rewards in (known or {}).get(kind, ())]

        both = {"chosen": of("chosen", "step"), "rejected": of("rejected", "step")}
        right = {"share of pairs": of("accuracies", "step"), "held-out": of("accuracies", "eval")}
        title = "Share of pairs whose chosen answer has the higher reward"
        charts = [
            ("curves", {"title": "Rewards in training", "curves": both, "zero": False}),
            ("curves", {"title": title, "curves": right}),
        ]
        return PageBlocks(sections={"Rewards": charts})


class PreferenceTuning(Extension):
    """Its section of a recipe makes the objective of peers and hub; this is its part of the page."""

    def page(self) -> PagePart:
        return RewardsOnPage()


extension = PreferenceTuning()
