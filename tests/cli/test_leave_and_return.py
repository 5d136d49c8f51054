"""A volunteer presses Ctrl-C and comes back: what it hands over, keeps, finds again. Real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_processes import LAUNCH, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="Windows cannot send Ctrl-C to one process"),
]
JOIN = ["join", "-", "-y", "--json", "--name", "gus"]


def states(told: list[dict[str, Any]], first: str) -> list[dict[str, Any]]:
    """What was told with these first words."""
    return [event for event in told if event.get("state", "").startswith(first)]


def test_a_leaver_hands_over_keeps_the_rest_and_finds_it_when_it_comes_back(tmp_path: Path) -> None:
    kept = Path(os.environ["COCKTAIL_HOME"]) / "kept"
    with running(tmp_path, *LAUNCH, "max_steps=5000", "--peers", "0") as launch:
        started = launch.until("run_started")
        with running(tmp_path, *JOIN, stdin=started["url"] + "\n") as join:
            for _ in range(3):
                join.until("step")
            join.process.send_signal(signal.SIGINT)
            assert join.wait() == 0
        (handed_over,), (wrote,) = states(join.told, "handed over"), states(join.told, "kept")
        gone = launch.until("peer_left", peer="gus")
        assert gone["legacy_bytes"] == handed_over["done"] > 0
        assert "of its residual's length" in handed_over["state"]
        (path,) = kept.rglob("*.*")
        assert (path.name, path.stat().st_size) == ("gus.safetensors", wrote["done"])
        assert 16 * started["parameters"] <= wrote["done"] < 16.1 * started["parameters"]

        with running(tmp_path, *JOIN, stdin=started["url"] + "\n") as again:
            back = again.until("step")
            assert len(states(again.told, "back with what it kept")) == 1
            assert not path.exists(), "or a crash later on would bring it back twice"
            assert back["round"] >= max(step["round"] for step in join.events("step"))
            launch.until("step", accepted=["gus"])
            launch.process.send_signal(signal.SIGINT)
            assert again.wait() == 0
        assert launch.wait() == 0
    assert not list(kept.rglob("*")), "the run is over"
