"""Samples of how a model on the host's disk continues held-out texts, and the upload.

Samples are written by the host's processor, greedily and within bounds of tokens and time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import ModelOnDisk, files_of
from cocktail_cli.errors import explain
from cocktail_cli.host import run_folder
from cocktail_cli.machine import read_run
from cocktail_cli.ui import Progressed, Warning

from .. import results

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.data import Prompt, Sample
    from recipes.downloads import Repository

log = logging.getLogger(__name__)

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
    from recipes.data import NEW, asked_in
    from recipes.hardware import host_memory
    from recipes.models import TextGenerator

    folder, code = work.model.folder, work.recipe.model.trust_remote_code
    if model.folder == folder:
        model.tell(Progressed("writing samples"))
    weights = sum(path.stat().st_size for path in work.model.base.glob("*.safetensors"))
    if weights > host_memory().free:
        model.tell(Warning("no samples: this machine's memory has no room for the model"))
        return
    try:
        writer = TextGenerator(model.folder, code, tokenizer=folder / run_folder.TOKENIZER)
        text = partial(writer.tokenizer.decode, skip_special_tokens=True)
        for prompt in prompts_of(work.corpus.held_out, many):
            if model.stop():
                return
            parts = (prompt.tokens, writer.complete(prompt.tokens, NEW, SECONDS), prompt.rest)
            said = (*(str(text(part)) for part in parts), asked_in(writer.tokenizer, prompt).text)
            model.tell(results.Sample(model.step, model.round, *said))
    except Exception as error:
        log.warning("samples of round %d", model.round, exc_info=True)
        model.tell(Warning(f"no samples: {explain(error).message}"))


def prompts_of(held_out: Sequence[Sample], many: int) -> list[Prompt]:
    """Choose prompts evenly from the held-out samples; the data alone decides, also in a resumed run."""
    from recipes.data import prompt_of

    chosen = held_out[:: max(1, len(held_out) // many)][:many]
    return [prompt_of(sample) for sample in chosen]
