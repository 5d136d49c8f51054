"""Results: samples of a run's models, and the finished one uploaded to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, ModelOnDisk, PageBlocks, PagePart
from cocktail_cli.ui import events

if TYPE_CHECKING:
    from recipes.config import Recipe

NAME = "results"  # of its section
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


class Results(Extension):
    """Only the host writes samples and uploads, and only what the recipe asks for."""

    def check_host(self, recipe: Recipe) -> None:
        """Open the repository: a token that may not write is found before hours of training."""
        keys: Any = recipe.extensions[NAME]
        if keys.push_to_hub:
            keys.repository.open()

    def chosen(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have base and model answer two of the rows that are held out."""
        return {f"{NAME}.sample_prompts": 2} if "data.val_set_size" in keys else {}

    def model_here(self, work: Any, model: ModelOnDisk, options: Mapping[str, Any]) -> None:
        """Upload the run's own model; write samples of each, unless the host wants to end."""
        from .sample_writer import push, write_samples

        keys: Any = work.recipe.extensions[NAME]
        if keys.push_to_hub and model.folder == work.model.folder:
            push(keys.repository, work.recipe, model)
        if keys.sample_prompts and not model.stop():
            write_samples(keys.sample_prompts, work, model)

    def events(self) -> tuple[type[Any], ...]:
        return (Sample,)

    def page(self) -> PagePart:
        return SamplesOnPage()


extension = Results()
