"""A hub that is killed while peers own shards: the owners are found again, with what they hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from test_hub_and_peer import FAST, Running, kill
from test_sharded_aggregators import ended
from toy_owners import SHARDS, OwnersWork, OwningPeer, owners_settings, reachable

from transport import Ledger, PeerLink
from transport.actions import Abandoned, Commit
from transport.peer import PeerIdentity
from transport.protocol import WeightedPacket
from transport.protocol.events import RoundCommitted

# Nobody is lost by a machine that is busy: what is in the packets is compared with what was trained.
SETTINGS = owners_settings(samples=160, first_peers=2, min_peers=2, peer_timeout=30.0, **FAST)


def killed_after(folder: Path, *, doors: bool) -> tuple[Running, list[OwningPeer]]:
    """A hub that was killed after a few rounds, and its peers, which dial it."""
    first = Running(folder, SETTINGS, work=OwnersWork())
    names = ("ann", "bob")
    if doors:
        peers = [reachable(first.url, name) for name in names]
    else:
        peers = [OwningPeer(PeerLink(first.url, PeerIdentity(name, owns=True))) for name in names]
    for peer in peers:
        peer.start()
    first.until(lambda events: sum(isinstance(e, RoundCommitted) for e in events) >= 4)
    kill(first)
    return first, peers


def go_on(folder: Path, first: Running, peers: list[OwningPeer]) -> None:
    """Start it anew, let the run end, and see that all is in it once."""
    work = OwnersWork()
    again = Running(folder, SETTINGS, first.keys, first.hub.port, work)
    work.packets[:] = [packet for _, packet in again.ledger.packets()]
    work.moved = [json.loads(packet)[2] for packet in work.packets]
    again.ended(30)
    for peer in peers:
        peer.link.close()
        peer.shut()
    again.close()

    assert [peer.error for peer in peers] == [None] * len(peers)
    ended(work, peers, again)


@pytest.mark.parametrize("doors", [False, True], ids=["through the hub", "at their doors"])
def test_owners_keep_their_shards_and_errors_when_the_hub_is_killed(tmp_path: Path, doors: bool) -> None:
    first, peers = killed_after(tmp_path, doors=doors)
    go_on(tmp_path, first, peers)

    assert {tuple(mine) for mine in peers[0].owned} == {tuple(peers[0].owned[0])}


def test_an_owner_whose_door_is_shut_when_the_hub_is_back_owns_nothing(tmp_path: Path) -> None:
    """The round that was open is open again with other owners: both cut their packets anew."""
    first, peers = killed_after(tmp_path, doors=True)
    assert peers[1].door is not None
    peers[1].door.close()
    go_on(tmp_path, first, peers)

    assert peers[0].owned[-1] == list(range(SHARDS))
    assert peers[1].owned[-1] == []


def test_errors_on_their_way_to_another_owner_outlive_the_hub(tmp_path: Path) -> None:
    """It is killed when it has taken what a leaver owed, and no other owner has it yet."""
    first = Running(tmp_path, replace(SETTINGS, first_peers=3), work=OwnersWork())
    peers = [OwningPeer(PeerLink(first.url, PeerIdentity(name, owns=True))) for name in ("ann", "bob", "cat")]
    shards = first.hub._shards
    aggregate = shards.aggregate

    def of_bob() -> bool:  # on a busy machine another owner may be taken for lost before him
        return any(left.peer == "bob" for left in first.hub._state.shards.handoffs.values())

    def until_one_has_left(action: Commit, updates: Sequence[WeightedPacket]) -> bytes | None:
        if of_bob():
            raise Abandoned
        return aggregate(action, updates)

    shards.aggregate = until_one_has_left  # type: ignore[method-assign]
    threads = [peer.start() for peer in peers]
    first.until(lambda events: first.committed() >= 4)
    peers[1].link.leave_requested.set()
    threads[1].join(15)
    assert peers[1].handed_over
    first.until(lambda events: of_bob())
    estates = dict(first.hub._state.shards.handoffs)
    kill(first)
    go_on(tmp_path, first, peers)

    with Ledger(tmp_path, write=False) as ledger:
        assert not estates.keys() & ledger.estates.rows().keys()
