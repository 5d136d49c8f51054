"""Samples of how a model on the host's disk continues held-out texts, and the upload.

Samples are written by the host's processor, greedily and within bounds of tokens and time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import ModelOnDisk, files_of
from cocktail_cli.errors import explain
from cocktail_cli.host import run_folder
from cocktail_cli.machine import read_run
from cocktail_cli.ui import Progressed, Warning

from . import events

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.data import Sample
    from recipes.downloads import Repository

log = logging.getLogger(__name__)

SHOWN = 16  # tokens of a text that are the prompt, where the data has none of its own
MOST = 128  # tokens of a prompt; of a longer one the end
NEW = 48  # tokens that the model adds
SECONDS = 8.0  # for one prompt


def push(repository: Repository, recipe: Recipe, model: ModelOnDisk) -> None:
    """Push the run's model, which is on the disk even if this fails."""
    run = record.run if (record := read_run(model.folder)) else ""
    model.tell(Progressed(f"pushing the model to {repository.name}"))
    try:
        address = repository.push(model.folder, f"{run}, {model.round} rounds", files_of(recipe))
    except Exception as error:
        again = f"cocktail export {run} -o DIR --push {repository.name}"
        model.tell(Warning(f"the model is not pushed: {explain(error).message}; again: {again}"))
    else:
        model.tell(Progressed(f"pushed: {address}"))


def write_samples(many: int, work: Any, model: ModelOnDisk) -> None:
    """Show how a model of the run `work` continues so many held-out texts, until it is to stop; nothing
    depends on it."""
    from recipes.models import TextGenerator

    folder, code = work.model.folder, work.recipe.model.trust_remote_code
    if model.folder == folder:
        model.tell(Progressed("writing samples"))
    try:
        writer = TextGenerator(model.folder, code, tokenizer=folder / run_folder.TOKENIZER)
        text = partial(writer.tokenizer.decode, skip_special_tokens=True)
        for prompt in prompts_of(work.corpus.held_out, many):
            if model.stop():
                return
            parts = (prompt.tokens, writer.complete(prompt.tokens, NEW, SECONDS), prompt.rest)
            model.tell(events.Sample(model.step, model.round, *(str(text(part)) for part in parts)))
    except Exception as error:
        log.warning("samples of round %d", model.round, exc_info=True)
        model.tell(Warning(f"no samples: {explain(error).message}"))


@dataclass(frozen=True)
class Prompt:
    """The beginning of a held-out text, and how it goes on."""

    tokens: list[int]
    rest: list[int]


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
