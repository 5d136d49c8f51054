"""Shards are placed by the links between peers as well as brute force could."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

from toy_aggregators import SHARDS, sharded_settings

from cocktail_cli.extensions.aggregators.hub import ShardCoordinator
from cocktail_cli.extensions.aggregators.shard_placement import Placement, assign
from transport.hub import HubParts, HubState
from transport.ledger import Recovered
from transport.protocol import messages
from transport.scheduling import Exchange


def divisions(shards: int, peers: int) -> Iterator[tuple[int, ...]]:
    if peers == 1:
        yield (shards,)
        return
    for first in range(shards + 1):
        for rest in divisions(shards - first, peers - 1):
            yield (first, *rest)


def test_no_placement_of_500_random_link_matrices_is_worse_than_that_of_brute_force() -> None:
    """The algorithm is exact; 1.05 would do."""
    dice, worst = random.Random(2026), 0.0
    for _ in range(500):
        peers, shards = dice.randint(2, 4), dice.randint(1, 5)
        links = [[10 ** dice.uniform(5.0, 8.0) for _ in range(peers)] for _ in range(peers)]
        able = sorted(dice.sample(range(peers), dice.randint(1, peers)))
        placement = Placement(shards, links, able)
        counts = placement.best()
        assert sum(counts) == shards
        assert all(count == 0 or place in able for place, count in enumerate(counts))
        found = [0] * len(counts)
        least = float("inf")
        for division in divisions(shards, len(able)):
            for peer, count in zip(able, division, strict=True):
                found[peer] = count
            least = min(least, placement.cost(found))
        worst = max(worst, placement.cost(counts) / least)

    assert worst <= 1.0 + 1e-9


def test_an_assignment_by_counts_gives_each_peer_so_many_shards() -> None:
    assigned = assign(10, ["ann", "bob", "cat"], {"ann": 7, "bob": 3, "cat": 0})

    assert {peer: len(shards) for peer, shards in assigned.items()} == {"ann": 7, "bob": 3}


def test_the_hub_places_shards_by_measured_uplinks_and_moves_none_for_noise() -> None:
    """An uplink that swings by a half either way stays what it was; one that collapses does not."""
    state = HubState(sharded_settings(), "", "secret", 0.0)
    for name in ("ann", "bob", "cat"):
        hello = messages.Hello(messages.PROTOCOL, "", "toy-run", name, address="h:1")
        state.receive(f"key-of-{name}.1".encode(), hello, 0.0)
    parts = HubParts(
        state.settings, state.out, state.members, state.admission, state.rounds, "secret", Recovered()
    )
    nothing = SimpleNamespace(rows={})
    shards = ShardCoordinator(parts, nothing, nothing, SHARDS, 0)  # type: ignore[arg-type]
    shards.watch(SimpleNamespace(later=lambda job: None))  # type: ignore[arg-type]
    sessions = list(state.members)

    def loads(*uplinks: float) -> list[int]:
        for session, uplink in zip(sessions, uplinks, strict=True):
            session.uplink, session.reachable = uplink, True
        shards.opens(Exchange(3, 3, {s.id: s.name for s in sessions}, 8, 0.0, 9.0), {})
        assert shards.now is not None
        mine = shards.now.aggregators
        return [len(mine[s.id].shards) if s.id in mine else 0 for s in sessions]

    assert loads(0.0, 0.0, 0.0) == [2, 2, 2], "nothing is measured yet"
    uneven = loads(1e5, 2e6, 2e6)
    assert uneven[0] == 0
    assert sum(uneven) == SHARDS
    assert loads(1.4e5, 3e6, 1.5e6) == uneven
    assert loads(2e6, 2e6, 2e6) == [2, 2, 2]
