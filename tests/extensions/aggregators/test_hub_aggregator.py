"""The hub's error feedback survives a kill while shards come and go."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_durable_aggregator import (
    MIX,
    SEED,
    Killed,
    Life,
    P,
    commit,
    error_of,
    handoffs_before,
    undisturbed,
    updates_of,
)

from cocktail_cli.extensions.aggregators.bodies import ShardPacket
from cocktail_cli.extensions.aggregators.durable_shards import HubAggregator
from cocktail_cli.extensions.aggregators.residual_handoffs import HUB, HandoffStore, PendingHandoff
from recipes.algorithm import Aggregator, select_shards

ASSIGNED = ([0, 1], [0, 1], [0], [0], [], [1], [0, 1], [0, 1])  # in each round


class SharedLife(Life):
    """A hub that aggregates some of the shards."""

    def __init__(self, folder: Path, least: int) -> None:
        super().__init__(folder, least)
        self.store = HandoffStore(self.ledger)
        self.shards = HubAggregator(self.durable, self.store)

    def own(self, round: int, assigned: list[int], *, dies: bool = False) -> list[bytes]:
        """Aggregate these shards; return the error feedback that was stored for others, as by the hub."""
        stored: list[bytes] = []

        def keep(errors: bytes) -> int:
            stored.append(errors)
            number = self.store.add(PendingHandoff(HUB, 1.0, frozenset(range(2)) - set(assigned)), errors)
            if dies:
                raise Killed
            return number

        if self.shards.own(round, assigned, keep):
            self.store.mark_merged({})
        return stored


def joined(life: SharedLife, round: int, own: bytes, others: list[int], part: bytes) -> bytes:
    return life.shards.joined(round, [], own, [ShardPacket("bob", others, part)])


def test_a_round_whose_aggregators_were_all_lost_is_logged_again_by_a_hub_that_aggregates_its_shards_then(
    tmp_path: Path,
) -> None:
    life = SharedLife(tmp_path, 1 << 30)
    assert life.own(0, []) == [], "there are none yet"
    life.durable.aggregate(0, updates_of(0))  # nobody's packet came: not committed

    assert life.own(0, [0, 1]) == [], "it had none"
    commit(life.ledger, 0, life.durable.aggregate(0, updates_of(0)))
    life.end()

    again = SharedLife(tmp_path, 1 << 30)
    assert torch.equal(error_of(again.durable), error_of(life.durable))
    again.end()


@pytest.mark.parametrize(
    ("least", "dies"),
    [(0, False), (1 << 30, False), (1 << 30, True)],
    ids=["e is saved often", "e is saved as shards change hands", "killed as shards change hands"],
)
def test_killed_after_every_step_while_shards_come_and_go_e_is_what_it_would_have_been(
    tmp_path: Path, least: int, dies: bool
) -> None:
    """Shards of other aggregators move by their packets, and have no error feedback here."""
    theirs, reference, kept = undisturbed(), Aggregator(P, MIX, SEED), list[bytes]()
    for round, assigned in enumerate(ASSIGNED):
        kept += filter(None, [reference.assign(assigned)])
        life = SharedLife(tmp_path, least)
        with suppress(Killed):
            life.own(round, assigned, dies=dies)
        life.end()
        life = SharedLife(tmp_path, least)
        assert life.own(round, assigned) == [], "these are on the disk for others"
        assert [life.store.packet(number) for number in life.store.rows] == kept
        for handoff in handoffs_before(round):
            reference.merge_handoff(*handoff)
            life.durable.inherit(*handoff)
        own = life.durable.aggregate(round, updates_of(round))
        assert own == reference.step(round, updates_of(round))
        others = [shard for shard in range(2) if shard not in assigned]
        part = select_shards(theirs[round], others, 2)
        commit(life.ledger, round, joined(life, round, own, others, part))
        life.durable.committed(round)
        life.end()

    again = SharedLife(tmp_path, least)
    assert list(again.durable.aggregator.assigned) == ASSIGNED[-1]
    assert torch.equal(error_of(again.durable), torch.cat([o.error for o in reference.assigned.values()]))
    again.end()
