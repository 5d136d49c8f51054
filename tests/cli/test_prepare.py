"""What a joiner imports while its weights come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cocktail_cli.prepare import Imports
from recipes.problems import ModelError
from recipes.recipe import load_recipe


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
