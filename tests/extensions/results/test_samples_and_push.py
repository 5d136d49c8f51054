"""Samples of a run's models, and the finished one pushed to the hub, whose client is a stand-in."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pushing_hub import Hub, status
from test_snapshot_thread import Story

from cocktail_cli.assembly import ModelOnDisk, model_here, recipe_type
from cocktail_cli.extensions.results import Sample, SamplesOnPage
from cocktail_cli.foreign_text import paragraphs
from cocktail_cli.host import HostSession
from cocktail_cli.machine import RunRecord, save_run
from cocktail_cli.ui import Metrics, Warning, events, sentence
from recipes import data
from recipes.config import Recipe, load_resolved
from recipes.errors import ModelError, RecipeError
from recipes.models import load_model, open_tokenizer

SAMPLES = ("sample_prompts=1", "data.val_set_size=4")
PUSHING = ("push_to_hub=true", "hub_model_id=me/m", "save_steps=4", "max_steps=40")
ROW = np.arange(40, dtype=np.int32)


def load(*overrides: str) -> Recipe:
    return load_resolved("smoke", overrides, extend=recipe_type).recipe


def work_of(of: Story, *overrides: str) -> Any:
    """The part of a run's delegate that results use."""
    held_out = [data.Sample(ROW, np.arange(40) > 0)] * 5
    return SimpleNamespace(recipe=load(*overrides), model=of.model, corpus=SimpleNamespace(held_out=held_out))


@pytest.mark.parametrize("key", ["sample_prompts=2", "push_to_hub=true"])
def test_keys_that_lack_something_are_refused_by_their_section(key: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(key, "data.val_set_size=0", "eval_steps=null")

    assert [problem.key for problem in refused.value.problems] == [f"results.{key.partition('=')[0]}"]


def test_the_base_and_each_snapshot_continue_the_same_held_out_text(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocktail_cli.extensions.results.sample_writer.SECONDS", 200.0)  # on a busy machine
    heard: list[Any] = []
    made = story.folder / "snapshots" / "4"
    story.commit(5)
    story.model.write_model(made, round=4)
    for model in (
        ModelOnDisk(story.model.base, 0, 0, heard.append, lambda: False),
        ModelOnDisk(made, 4, 5, heard.append, lambda: False),
    ):
        model_here(work_of(story, *SAMPLES), model)

    before, after = heard
    assert isinstance(before, Sample)
    assert isinstance(after, Sample)
    assert ((before.round, before.step), (after.round, after.step)) == ((0, 0), (4, 5))
    assert (before.prompt, before.reference) == (after.prompt, after.reference)
    tokenizer = open_tokenizer(story.folder / "tokenizer")
    held_out = tokenizer.decode(ROW.tolist(), skip_special_tokens=True)
    assert before.prompt + before.reference == paragraphs(held_out)
    model = load_model(made)
    greedy = model.generate(torch.from_numpy(ROW[None, :16]).long(), do_sample=False, max_new_tokens=data.NEW)
    assert after.text == paragraphs(tokenizer.decode(greedy[0, 16:], skip_special_tokens=True))


def test_a_sample_that_cannot_be_written_is_a_warning(story: Story) -> None:
    heard: list[Any] = []
    work = work_of(story, *SAMPLES)
    (story.folder / "tokenizer").rename(story.folder / "no-tokenizer")

    model_here(work, ModelOnDisk(story.model.base, 0, 0, heard.append, lambda: False))

    [warning] = heard
    assert isinstance(warning, Warning)
    assert warning.message.startswith("no samples: ")


def test_a_run_that_was_told_to_stop_writes_no_samples(story: Story) -> None:
    work = work_of(story, *SAMPLES)

    model_here(work, ModelOnDisk(story.model.base, 0, 0, pytest.fail, lambda: True))


def test_a_token_that_may_not_write_fails_the_launch_before_the_run(tmp_path: Path, hub: Hub) -> None:
    hub.error = status(401)

    with pytest.raises(ModelError, match="may not write"):
        HostSession(load(*PUSHING), tmp_path, []).prepare()


def test_a_final_push_that_fails_is_a_warning_with_the_command_that_repeats_it(
    story: Story,
    hub: Hub,
) -> None:
    heard: list[Any] = []
    save_run(RunRecord("amber-otter-42", "", {}, 1, 1, "", str(story.folder), "", "r", "h", "t"))
    model = ModelOnDisk(story.folder, 6, 6, heard.append, lambda: True)
    work = work_of(story, *PUSHING)
    model_here(work, replace(model, folder=story.folder / "snapshots" / "4"))
    assert heard == [], "only the run's own is pushed"

    model_here(work, model)
    hub.error = status(500)
    model_here(work, model)

    assert [pushed["commit_message"] for pushed in hub.pushed] == ["amber-otter-42, 6 rounds"]
    assert "cocktail export amber-otter-42 -o DIR --push me/m" in heard[-1].message


def test_a_sample_is_a_line_for_people_and_one_of_the_metrics() -> None:
    sample = Sample(3, 2, "The import", "s\nare", " statement")

    assert sentence(sample) == "sample step=3 'The import' -> 's are'"
    long = replace(sample, prompt="system\nBe kind.\nuser\nWhen?", text="At " * 40, asked="When? " * 40)
    assert sentence(long) == f"sample step=3 {('When? ' * 10)!r} -> {('At ' * 20)!r}"
    [line] = Metrics().lines(sample)
    assert (line["kind"], line["step"], line["text"]) == ("sample", 3, "s\nare")


def test_the_models_own_words_are_on_the_page() -> None:
    part, known = SamplesOnPage(), None
    for step, text in ((0, " xx<b>xx"), (10, " a\x1b\x00\n function")):
        told = Sample(step, step, "The import", text, " statement")
        known = part.heard(known, json.loads(events.as_json(told)))

    [(kind, _), (sample, shown)] = part.show(known).sections["Samples"]

    assert (kind, sample) == ("p", "sample")
    assert [(one["step"], one["text"], one["reference"]) for one in shown] == [
        (10, " a??\n function", " statement"),
        (0, " xx<b>xx", " statement"),
    ], "the newest first"
    assert part.show(None).sections == {"Samples": []}
