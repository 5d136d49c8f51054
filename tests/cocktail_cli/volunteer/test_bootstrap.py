"""Imports of a joiner while its weights come, and its words when it is back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cocktail_cli.ui.events import Progressed, Warning
from cocktail_cli.volunteer.bootstrap import OPTIMIZER_RESTARTS, Bootstrap, Imports
from recipes.config.loader import load_recipe
from recipes.errors import ModelError
from transport.peer.catch_up import CatchUpSource


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
