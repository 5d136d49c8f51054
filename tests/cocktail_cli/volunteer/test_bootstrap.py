"""Imports of a joiner while its weights come, and its words when it is back."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cocktail_cli.errors import Failure
from cocktail_cli.ui import Progressed, Warning
from cocktail_cli.volunteer import Bootstrap, Imports
from cocktail_cli.volunteer.bootstrap import OPTIMIZER_RESTARTS
from recipes.config import load_recipe
from recipes.errors import ModelError
from recipes.models import BUILTIN_MODELS
from transport.peer import CatchUpSource
from transport.protocol import messages


def go_on() -> None:
    return None


def test_a_model_that_cannot_be_made_here_is_found_out_by_its_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of next year"}))
    with Imports(load_recipe("smoke")) as imports:
        imports.read(tmp_path)
        with pytest.raises(ModelError, match="of next year"):
            imports.wait(go_on)
        with pytest.raises(ModelError):
            imports.check()


def test_who_leaves_before_there_is_a_config_does_not_wait_for_it() -> None:
    with Imports(load_recipe("smoke")) as imports:
        imports.check()

    assert not imports.thread.is_alive()
    assert imports.error is None


@pytest.mark.parametrize(
    ("stepped", "optim", "told"),
    [(True, "adamw_8bit", []), (False, "adamw_8bit", [Warning(OPTIMIZER_RESTARTS)]), (False, "sgd", [])],
)
def test_a_peer_that_is_back_says_where_its_optimizer_begins_anew(
    stepped: bool, optim: str, told: list[Warning]
) -> None:
    """SGD keeps nothing: there is nothing to miss."""
    heard: list[object] = []
    kept: Any = SimpleNamespace(round=3, restore=lambda *_: None)
    machine = SimpleNamespace(plan=SimpleNamespace(way=CatchUpSource.SNAPSHOT))
    back: Any = SimpleNamespace(checkpoint=kept, machine=machine, show=heard.append)
    peer: Any = SimpleNamespace(
        trainer=SimpleNamespace(stepped=stepped), recipe=load_recipe("smoke", [f"optim={optim}"])
    )

    Bootstrap.restore_checkpoint(back, peer)

    assert heard == [Progressed("back with what it kept at round 3"), *told]


MADE = SimpleNamespace(given=None, stored=1000, parameters=1000)  # of a model that is trained whole
LENT = SimpleNamespace(given=None, stored=10**6, parameters=1000)  # and of adapters


def sized(weights: int, snapshot: int | None) -> Any:
    """A joiner's bootstrap where the hub offers files of these sizes."""
    files = [messages.File("model.safetensors", weights, "0" * 64), messages.File("config.json", 9, "0" * 64)]
    offer = messages.SnapshotOffer(2, snapshot, "0" * 64, 0) if snapshot is not None else None
    return SimpleNamespace(files=files, machine=SimpleNamespace(plan=SimpleNamespace(offer=offer)))


@pytest.mark.parametrize(
    ("made", "weights", "snapshot"),
    [
        # of 4 bits, bfloat16, float32, twice
        *[(MADE, weights, None) for weights in (500, 2000, 4000, 8000)],
        *[(MADE, 2000, size) for size in (4000, 4000 + 2000 + 100_000)],  # with buffers and a long header
        (LENT, 2 * 10**6, 4200),
    ],
)
def test_weights_and_snapshots_of_the_sizes_that_there_are_may_be_fetched(
    made: Any, weights: int, snapshot: int | None
) -> None:
    Bootstrap._check_sizes(sized(weights, snapshot), made)


@pytest.mark.parametrize(
    ("weights", "snapshot", "said"),
    [
        (499, None, "make 1,000 parameters of weights that have 499 bytes"),
        (2 << 30, None, "offers weights of 2.1 GB as a model of 1,000 parameters"),
        (2000, 3999, "a snapshot of 3,999 bytes; 1,000 parameters are trained, of 4,000 bytes"),
        (2000, 20 << 20, "a snapshot of 20,971,520 bytes; 1,000 parameters are trained"),
    ],
)
def test_weights_that_cannot_be_the_models_are_a_lie(weights: int, snapshot: int | None, said: str) -> None:
    with pytest.raises(Failure, match=said) as caught:
        Bootstrap._check_sizes(sized(weights, snapshot), MADE)  # type: ignore[arg-type]
    assert caught.value.exit == 6


def test_a_lie_about_weights_is_found_while_they_arrive(tmp_path: Path) -> None:
    shutil.copyfile(BUILTIN_MODELS["builtin:tiny-gpt-neox"] / "config.json", tmp_path / "config.json")

    def check(made: Imports) -> None:
        raise Failure("rejected", f"{made.parameters} parameters")

    with Imports(load_recipe("smoke"), check) as imports:
        imports.read(tmp_path)
        with pytest.raises(Failure, match="1012992 parameters"):
            imports.wait(go_on)
