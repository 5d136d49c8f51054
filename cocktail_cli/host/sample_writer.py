"""Samples: how the global model continues texts of the held-out data (`logging.sample_prompts`).

The host's processor writes them before the first step, at each snapshot and at the end, greedily and within
bounds of tokens and time. A run that does not ask for samples never imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.ui import events

if TYPE_CHECKING:
    from recipes.data import Sample

SHOWN = 16  # tokens of a text that are the prompt, where the data has none of its own
MOST = 128  # tokens of a prompt; of a longer one the end
NEW = 48  # tokens that the model adds
SECONDS = 8.0  # for one prompt


@dataclass(frozen=True)
class Prompt:
    """The beginning of a held-out text, and how it goes on."""

    tokens: list[int]
    rest: list[int]


@dataclass(frozen=True)
class SampleWriter:
    """Continues the same prompts with one model after the other."""

    prompts: Sequence[Prompt]
    tokenizer: Path  # folder
    code: bool = False  # run the model's own code, as its recipe and its host allow

    def write(
        self, folder: Path, round: int, step: int, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[events.Sample]:
        """Load the model in `folder` and let it continue each prompt, until `stop` returns true."""
        from recipes.models import TextGenerator

        writer = TextGenerator(folder, self.code, tokenizer=self.tokenizer)

        def text(tokens: list[int]) -> str:
            return str(writer.tokenizer.decode(tokens, skip_special_tokens=True))

        for prompt in self.prompts:
            if stop():
                return
            added = writer.complete(prompt.tokens, NEW, SECONDS)
            yield events.Sample(step, round, text(prompt.tokens), text(added), text(prompt.rest))


def prompts_of(held_out: Sequence[Sample], many: int) -> list[Prompt]:
    """Choose prompts evenly from the held-out samples; the data alone decides, also in a resumed run."""
    chosen = held_out[:: max(1, len(held_out) // many)][:many]
    return [prompt_of(sample) for sample in chosen]


def prompt_of(sample: Sample) -> Prompt:
    """Split a sample's first document before its first trained token, or plain text after SHOWN tokens."""
    length = sample.lengths[0]
    tokens, trained = sample.tokens[:length].tolist(), sample.trained[:length]
    first = int(trained.argmax()) if trained.any() else 0
    cut = first if first > 1 else min(SHOWN, max(1, length // 2))
    return Prompt(tokens[max(0, cut - MOST) : cut], tokens[cut : cut + NEW])
