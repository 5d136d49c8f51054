"""Revisions become commits: what a run begins with is what it goes on with."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.config import Recipe, load_recipe
from recipes.errors import HubUnreachable
from recipes.models import BUILTIN_MODELS, pin_revisions, prepare_base

OLD, NEW = "a0" * 20, "b1" * 20
NAME = "some/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, with one commit of one model, which its branch v1 is. The hub does not answer."""
    entry = tmp_path / "models--some--model"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "v1").write_text(OLD)
    base = prepare_base(load_recipe("smoke"), tmp_path / "made").folder
    shutil.copytree(base, entry / "snapshots" / OLD)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return entry


def recipe(*overrides: str) -> Recipe:
    return load_recipe("smoke", [f"model_name_or_path={NAME}", *overrides])


def test_a_branch_becomes_the_commit_that_it_is_and_stays_that_when_the_branch_moves(
    hub: Path, tmp_path: Path
) -> None:
    asked = recipe("model_revision=v1")
    base = prepare_base(asked, tmp_path / "unused")

    run = pin_revisions(asked, base.folder)
    (hub / "refs" / "v1").write_text(NEW)

    assert run.model.model_revision == OLD
    assert run.recipe_hash != asked.recipe_hash
    assert pin_revisions(run, base.folder) == run
    assert prepare_base(run, tmp_path / "unused").digest == base.digest
    with pytest.raises(HubUnreachable):  # the branch is a commit now that is not in the cache
        prepare_base(asked, tmp_path / "unused")


def test_data_on_the_hub_are_named_by_commit_and_other_data_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dataset_info(self: object, name: str, revision: str | None) -> SimpleNamespace:
        return SimpleNamespace(sha={("some/data", None): OLD, ("some/more", "v2"): NEW}[name, revision])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a row"}\n')
    mixed = [
        "datasets.0.path=some/data",
        f"eval_datasets=[{{path: some/more, revision: v2}}, {{path: {rows}}}]",
    ]
    asked = load_recipe("smoke", [*mixed, "val_set_size=0"])

    run = pin_revisions(asked, BUILTIN_MODELS["builtin:tiny-gpt-neox"])

    assert [one.revision for one in (*run.datasets, *run.eval_datasets)] == [OLD, NEW, None]
    assert run.model == asked.model
    assert pin_revisions(load_recipe("smoke"), tmp_path) == load_recipe("smoke")
