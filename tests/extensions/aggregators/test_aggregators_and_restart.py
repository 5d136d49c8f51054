"""A hub killed while peers aggregate shards finds the aggregators again, with their error feedback."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hub_swarm import FAST
from test_sharded_aggregators import ended
from toy_aggregators import SHARDS, AggregatingPeer, ShardedSwarm, ShardedWork, reachable, sharded_settings

from cocktail_cli.extensions.aggregators.residual_handoffs import HandoffStore, PendingHandoff
from transport import Ledger
from transport.actions import Abandoned
from transport.protocol import WeightedPacket

# Nobody is lost by a machine that is busy: what is in the packets is compared with what was trained.
SETTINGS = sharded_settings(
    samples=160, first_peers=2, min_peers=2, peer_timeout=30.0, **FAST | {"recover_s": 30.0}
)


def killed_after(folder: Path, *, doors: bool) -> tuple[ShardedSwarm, list[AggregatingPeer]]:
    """Kill a hub after a few rounds; return it and its peers, which dial it."""
    first = ShardedSwarm(SETTINGS, ShardedWork(), folder, 0).start()
    names = ("ann", "bob")
    peers = [reachable(first.url, name) for name in names]
    for peer in peers:
        if not doors:
            peer.direct = None
        peer.start()
    first.until(lambda: first.committed() >= 4)
    first.kill()
    return first, peers


def go_on(folder: Path, first: ShardedSwarm, peers: list[AggregatingPeer]) -> None:
    """Restart the hub, let the run end, and assert that each sample is in it once."""
    work = ShardedWork()
    again = ShardedSwarm(SETTINGS, work, folder, first.hub.port, first.keys)
    work.packets[:] = [packet for _, packet in again.ledger.packets()]
    work.moved = [json.loads(packet)[2] for packet in work.packets]
    again.start().ended(120)
    for peer in peers:
        peer.link.close()
        peer.shut()
    again.close()

    assert [peer.error for peer in peers] == [None] * len(peers)
    ended(work, peers, again)


@pytest.mark.parametrize("doors", [False, True], ids=["through the hub", "at their doors"])
def test_aggregators_keep_shards_and_error_feedback_over_a_restart(tmp_path: Path, doors: bool) -> None:
    first, peers = killed_after(tmp_path, doors=doors)
    go_on(tmp_path, first, peers)

    assert {tuple(mine) for mine in peers[0].owned} == {tuple(peers[0].owned[0])}


def test_an_aggregator_that_is_unreachable_after_the_restart_gets_no_shards(tmp_path: Path) -> None:
    """The open round is reopened with other aggregators, so both peers cut their packets anew."""
    first, peers = killed_after(tmp_path, doors=True)
    assert peers[1].door is not None
    peers[1].door.close()
    go_on(tmp_path, first, peers)

    assert peers[0].owned[-1] == list(range(SHARDS))
    assert peers[1].owned[-1] == []


def test_a_handoff_in_transit_outlives_the_hub(tmp_path: Path) -> None:
    """The hub is killed when it has stored a leaver's handoff that no other aggregator has merged."""
    first = ShardedSwarm(replace(SETTINGS, first_peers=3), ShardedWork(), tmp_path, 0).start()
    peers = [reachable(first.url, name) for name in ("ann", "bob", "cat")]
    shards = first.coordinator
    sums, store = first.hub._commits._sums, shards.store.add
    stored: list[int] = []  # handoffs of bob; on a busy machine another may be taken for lost before him

    def note_bob(handoff: PendingHandoff, packet: bytes) -> int:
        number = store(handoff, packet)
        if handoff.peer == "bob":
            stored.append(number)
        return number

    def until_bob_has_left(round: int, updates: Sequence[WeightedPacket]) -> bytes:
        # The others would go on without him, perhaps to the end of the run before his handoff is here.
        alone = peers[1].link.leave_requested.is_set() and "bob" not in shards._round.members.values()
        if stored or alone:
            raise Abandoned
        return sums.aggregate(round, updates)

    shards.store.add = note_bob  # type: ignore[method-assign]
    first.hub._commits._sums = sums._replace(aggregate=until_bob_has_left)
    threads = [peer.start() for peer in peers]
    first.until(lambda: first.committed() >= 4)
    peers[1].link.leave_requested.set()
    threads[1].join(120)
    assert peers[1].handed_over
    first.until(lambda: stored and stored[0] in first.coordinator.handoffs)
    handoffs = dict(first.coordinator.handoffs)
    first.kill()
    go_on(tmp_path, first, peers)

    with Ledger(tmp_path, write=False) as ledger:
        assert not handoffs.keys() & HandoffStore(ledger).rows.keys()
