from typing import Any

import pytest
from sim_swarm import SimPeer, SimSwarm
from toy_swarm import toy_settings

from transport import actions as do
from transport.membership import Session, State
from transport.protocol import encode, hash_of_names, messages
from transport.scheduling import Exchange
from transport.scheduling.exchange import Commit


def told(members: int) -> tuple[messages.Round, messages.Committed]:
    """What a member hears of a round in which all updates are accepted."""
    names = {f"session-{i}": f"p{i:05}" for i in range(members)}
    peer = Session("session-7", "key", "p00007", "", b"", State.READY, 0.0, 0.0)
    opened = Exchange(3, 3, names, members, 0.0, 0.0).message(peer, 9, 1, None)
    committed = messages.Committed(3, 1000, "00" * 32, list(names.values()), {"p00007": "x", "p00008": "y"})
    return opened, Commit(committed).to(peer.name)


def size(members: int) -> int:
    return sum(len(encode(message)) for message in told(members))


def test_what_a_member_is_told_of_a_large_round_has_as_many_bytes_however_large_it_is() -> None:
    assert size(messages.NAMED + 1) <= 300
    assert size(10_000) <= size(messages.NAMED + 1) + 4, "two counts of two bytes more"


@pytest.mark.parametrize("members", [8, messages.NAMED])
def test_of_a_round_of_few_all_hear_all_names(members: int) -> None:
    opened, committed = told(members)

    assert opened.members == committed.accepted == [f"p{i:05}" for i in range(members)]
    assert (opened.count, opened.names, committed.count, committed.names) == (0, "", 0, "")


class Heard(SimSwarm):
    """A swarm of one round, and what its hub says to each peer."""

    def __init__(self, peers: int, reject: str) -> None:
        self.told: dict[str, list[Any]] = {}
        everybody = {"min_peers": peers, "first_peers": peers}
        super().__init__(0, toy_settings(samples=peers, global_batch=peers, **everybody))
        self.reject = reject
        for number in range(peers):
            self.join(f"p{number:03}")
        self.settle()

    def act(self, actions: list[do.Action]) -> None:
        for action in actions:
            if isinstance(action, do.Send) and isinstance(
                action.message, messages.Round | messages.Committed
            ):
                peer = self.cables[action.conn][1].state.hello.name
                self.told.setdefault(peer, []).append(action.message)
        super().act(actions)


def test_the_count_and_the_hash_are_those_of_the_ledger_and_each_peer_hears_of_itself() -> None:
    swarm = Heard(messages.NAMED + 3, reject="p003")
    row = swarm.books.rounds[0]
    names = set(row.members)

    assert len(names) == messages.NAMED + 3
    for name in names:
        opened, committed = swarm.told[name][:2]
        assert isinstance(opened, messages.Round)
        assert isinstance(committed, messages.Committed)
        assert (opened.peers, opened.names) == (len(names), hash_of_names(row.members))
        assert (committed.count, committed.names) == (len(names) - 1, hash_of_names(row.accepted))
        assert committed.accepted == ([name] if name != "p003" else [])
        assert committed.refused == ({} if name != "p003" else {"p003": "unusable"})


class Unhurried(Heard):
    """Each message to the hub takes a quarter of a second."""

    def up(self, peer: SimPeer) -> None:
        self.now += 0.25
        super().up(peer)


def test_each_peer_hears_how_long_its_update_has_waited_for_the_last_one() -> None:
    swarm = Unhurried(3, reject="")
    waited = [swarm.told[name][-1].waited for name in ("p000", "p001", "p002")]

    assert waited == [0.5, 0.25, 0.0]
