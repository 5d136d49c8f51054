"""Laws of a tree of hubs, in process with real packets (memory_tree.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from memory_tree import QUICK, Tree

KILLS = {2: "closed", 4: "logged", 6: "committed above", 8: "settled", 10: "committed here"}


@pytest.mark.slow
def test_an_inner_hub_killed_at_each_step_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    """It is killed five times in one run, and starts again from its disk. Every sample is counted once, x' is
    the same to the bit at each level, and all residuals, d_h, e and x' together are all steps taken."""
    left = dict(KILLS)

    def at(name: str, step: str, round: int) -> bool:
        first = min(left, default=round + 1)
        return name == "h0" and round >= first and step == left[first] and bool(left.pop(first))

    with Tree(tmp_path, ["h0", "h1"], replace(QUICK, samples=320), at=at) as tree:
        for hub, name in (("h0", "ann"), ("h0", "bob"), ("h1", "cem")):
            tree.peer(hub, name)
        for _ in KILLS:
            tree.hubs["h0"].kill_and_restart()
        tree.wait()
        tree.audit()
        assert all(peer.over is not None and peer.over.finished for peer in tree.peers.values())
