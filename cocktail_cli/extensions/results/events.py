"""The event of a sample, and the samples on a run's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cocktail_cli.assembly import PageBlocks, PagePart
from cocktail_cli.ui import events

SAMPLES = 400  # that a page remembers; the oldest are dropped first
LINE = 60  # characters of each text in a line
GOES_ON = "The model goes on from texts that it was not trained on; it takes the likeliest token each time."


@events.event
class Sample(events.OfExtension):
    """The global model has continued a text of the held-out data."""

    step: int
    round: int
    prompt: str
    text: str  # the model's own words
    reference: str = ""  # how the held-out text goes on
    asked: str = ""  # the user's last message in the prompt, or else all of it

    texts = ("prompt", "text", "reference", "asked")
    news = True

    def sentence(self) -> str:
        asked, text = (" ".join(one.split())[:LINE] for one in (self.asked or self.prompt, self.text))
        return f"sample step={self.step} {asked!r} -> {text!r}"

    def measured(self) -> dict[str, Any]:
        return asdict(self)


class SamplesOnPage(PagePart):
    """The model's continuations of held-out texts, the newest first."""

    def heard(self, known: tuple[Sample, ...] | None, event: Mapping[str, Any]) -> tuple[Sample, ...]:
        known = known or ()
        if event["event"] != "sample":
            return known
        said = (str(event.get(name, "")) for name in Sample.texts)
        return (*known[-SAMPLES:], Sample(event["step"], event["round"], *said))

    def show(self, known: tuple[Sample, ...] | None) -> PageBlocks:
        by_prompt: dict[str, list[Any]] = {}
        for one in reversed(known or ()):
            by_prompt.setdefault(one.prompt, []).append(asdict(one))
        blocks = [("p", GOES_ON), *(("sample", made) for made in by_prompt.values())] if by_prompt else []
        return PageBlocks(sections={"Samples": blocks})
