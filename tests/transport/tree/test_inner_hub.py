"""Laws of a tree of hubs, in process with real packets (memory_tree.py)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from memory_tree import QUICK, Inner, Tree

from transport.protocol.events import EvaluationDone, RoundCommitted

KILLS = {  # at the first such step from this round on
    2: ("h0", "closed"),
    4: ("h0", "logged"),
    6: ("h0/h2", "logged"),
    8: ("h0", "committed above"),
    10: ("h0", "settled"),
    12: ("h0", "committed here"),
}
DARK = 10  # in this round the line of h0 to the root is dark, so that the root goes on without it
RUN = replace(QUICK, samples=320, eval=True, eval_every=4)


@pytest.mark.slow
def test_an_inner_hub_killed_at_each_step_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    """Hubs of three levels are killed six times, once after a packet was refused, and start again from their
    disks. Every sample is counted once, x' is the same to the bit at each level, evaluated as wanted,
    and all residuals, d_h, e and x' together are all steps taken."""
    left, dark = dict(KILLS), list[int]()

    def at(name: str, step: str, round: int) -> bool:
        first = min(left, default=round + 1)
        if round < first:
            return False
        if first == DARK and (name, step) == ("h0", "closed") and not dark:
            dark.append(round)
            tree.hubs["h0"].darken(0.6)
        return (name, step) == left[first] and bool(left.pop(first))

    with Tree(tmp_path, ["h0", "h1", "h0/h2"], RUN, at=at) as tree:
        for hub, name in (("h0", "ann"), ("h0/h2", "bob"), ("h0/h2", "cem"), ("h1", "dan")):
            tree.peer(hub, name)
        for killed, _ in KILLS.values():
            tree.hubs[killed].kill_and_restart()
        events = tree.wait()
        tree.audit()
        rounds = [event for event in events if isinstance(event, RoundCommitted)]
        assert rounds[dark[0]].accepted == ("h1",)
        assert [event.final for event in events if isinstance(event, EvaluationDone)][-1]
        assert all(peer.over is not None and peer.over.finished for peer in tree.peers.values())


def test_a_hub_whose_children_took_no_part_ends_with_the_last_packets(tmp_path: Path) -> None:
    """The run ends with the updates of others while a hub waits for its children: x' is the same there."""
    with Tree(tmp_path, ["h1"], replace(QUICK, linger_s=2.0)) as tree:
        idle = tree.hubs["h0"] = Inner(tree, "h0", lambda step, round: False)
        idle.start()
        tree.peer("h1", "dan")
        tree.wait()
        assert idle.inner.hub.join(10.0)
        tree.audit()
