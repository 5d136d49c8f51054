"""Laws of a tree of hubs, in process with real packets (memory_tree.py)."""

from __future__ import annotations

from pathlib import Path

from memory_tree import Tree


def test_two_levels_train_every_sample_once_and_agree_to_the_bit(tmp_path: Path) -> None:
    """A run of two inner hubs with two peers each ends, and every law holds."""
    with Tree(tmp_path, ["h0", "h1"]) as tree:
        for hub, name in (("h0", "ann"), ("h0", "bob"), ("h1", "cem"), ("h1", "dan")):
            tree.peer(hub, name)
        tree.wait()
        tree.audit()
        assert all(peer.over is not None and peer.over.finished for peer in tree.peers.values())
