"""A tiny model and a few rows, for runs in this process."""

import json
from pathlib import Path

import pytest
from in_process import rows, save_tiny
from traced_once import traces_are_shared  # noqa: F401
from unhurried import unhurried  # noqa: F401


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt_neox", tmp_path_factory.mktemp("neox"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(66)))
    return path
