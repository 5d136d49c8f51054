"""Stages in a run, from its recipe on: what is written into it, and what its hub makes of machines."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from in_this_process import Run
from lying_host import lying_host
from test_run_delegate import Rows

from cocktail_cli.assembly import pinned, recipe_type
from cocktail_cli.extensions.stages import extension
from cocktail_cli.host import RunDelegate
from recipes.config import Recipe, load_resolved, recipe_from_json
from recipes.errors import RecipeError
from recipes.models import prepare_base


def load(*overrides: str) -> Recipe:
    return load_resolved("smoke", overrides, extend=recipe_type).recipe


def test_bits_of_activations_turn_stages_on_and_shards_of_layers_name_them() -> None:
    assert load("activation_bits=4").extensions == load("stages.activation_bits=4").extensions
    assert load("stages={}").recipe_hash == load("activation_bits=32").recipe_hash
    with pytest.raises(RecipeError, match=r"stages=\{\}"):
        load("compression.shards=layers")
    with pytest.raises(RecipeError, match="under `stages:` each layer is a shard"):
        load("stages={}", "compression.shards=8")


def test_a_launch_writes_where_layers_end_and_changes_nothing_of_a_run_without_stages(tmp_path: Path) -> None:
    recipe = load("stages={}")
    base = prepare_base(recipe, tmp_path / "base")
    written = pinned(recipe, base.folder)
    with closing(RunDelegate(written, base, Rows(range(64)), tmp_path / "ledger")) as work:  # type: ignore[arg-type]
        assert isinstance(written.compression.shards, tuple)
        assert written.compression.shards[-1] == work.parameters
        assert work.prepared[extension].layers < written.compression.shard_count
    assert pinned(written, base.folder) == written == recipe_from_json(written.to_json(), recipe_type)
    assert pinned(load(), base.folder) == load()


def test_who_is_ready_divides_no_model_when_the_hub_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load("stages={}")
    base = prepare_base(recipe, tmp_path / "base")
    with closing(RunDelegate(recipe, base, Rows(range(64)), tmp_path / "ledger")) as work:  # type: ignore[arg-type]
        _ = work.prepared
        monkeypatch.setattr(type(extension), "prepare", lambda *_: pytest.fail("the model is divided"))
        assert work.prepared[extension] is not None


@pytest.mark.parametrize("refused", ["fp16=true", "momentum_masking=true"])
def test_a_run_that_stages_cannot_train_divides_no_model_so_its_hub_refuses_lent_machines(
    tmp_path: Path, refused: str
) -> None:
    recipe = load("stages={}", refused)
    base = prepare_base(recipe, tmp_path / "base")
    with closing(RunDelegate(recipe, base, Rows(range(64)), tmp_path / "ledger")) as work:  # type: ignore[arg-type]
        assert work.prepared[extension] is None
        parts: Any = type("Host", (), {"work": work, "recipe": recipe})
        begin = extension.hub(parts)
        assert begin.name == "stages"
        assert type(begin(None)).__name__ == "Undivided"


def test_who_would_lend_memory_to_a_run_without_stages_is_told_what_its_host_can_do(cocktail: Run) -> None:
    with lying_host() as hub:
        said = cocktail("join", hub.url, "-y", "--device", "cpu", "--layers", "25MB")

    assert said.exit == 6, said.err
    assert "this run's model is not divided among machines: its host can set stages={}" in said.err


@pytest.mark.parametrize("other", [("--gpus", "2"), ("--until", "08:00"), ("--max-temp", "70")])
def test_a_machine_is_lent_with_one_device_and_at_any_hour(cocktail: Run, other: tuple[str, str]) -> None:
    said = cocktail("join", "cocktail://x", "-y", "--layers", "auto", *other)

    assert said.exit == 2, said.err
    assert "the hub places a machine with one device, at any hour" in said.err
