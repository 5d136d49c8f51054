"""A tiny model and a few rows, for runs in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import rows, save_tiny
from traced_once import traces_are_shared  # noqa: F401

from transport.scheduling import LoadBalancer


@pytest.fixture(scope="module", autouse=True)
def even_shares() -> Iterator[None]:
    """Shares that follow a clock differ by run, and losses with them. They have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadBalancer, "note", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt_neox", tmp_path_factory.mktemp("neox"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(66)))
    return path
