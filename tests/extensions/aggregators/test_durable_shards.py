"""The error feedback of a peer's shards survives a kill at any step of a round."""

from errno import ENOSPC
from os import strerror
from pathlib import Path

import pytest
import torch
from test_durable_aggregator import MIX, SEED, P, handoffs_before, updates_of

from cocktail_cli.extensions.aggregators.durable_shards import DurableShards
from recipes.algorithm import Aggregator, select_shards
from transport.protocol import UpdateRejected

ROUNDS = 6
DIES = ("never", "after each aggregate", "after each commit", "after each step")


def begin(folder: Path, least: int = 1 << 20) -> DurableShards:
    shards = DurableShards(Aggregator(P, MIX, SEED, assigned=()), folder / "ann@hub", least)
    shards.recover()
    return shards


def error_of(shards: DurableShards) -> torch.Tensor:
    return torch.cat([one.error for _, one in sorted(shards.aggregator.assigned.items())])


def settled_error(back: DurableShards) -> torch.Tensor:
    """The error feedback of one just started, once it heard that its newest aggregate is committed."""
    if back.pending is not None:
        back.settle()
    return error_of(back)


def its_part(round: int, salt: int = 0) -> list[tuple[str, bytes, float]]:
    """The updates that two peers bring to the aggregator of shard 1."""
    return [(peer, select_shards(packet, [1], 2), weight) for peer, packet, weight in updates_of(round, salt)]


def lives(folder: Path, dies: str, least: int = 1 << 20) -> DurableShards:
    """Some rounds, of which the third is closed twice and the fifth is not committed; a process that dies
    ends without a word, and another one takes its place."""
    shards = begin(folder, least)
    shards.own([1])
    for round in range(ROUNDS):
        for attempt in range(2 if round == 2 else 1):
            if attempt:
                shards.undo()
            packet = shards.aggregate(round, its_part(round, attempt), handoffs_before(round))
            if dies in ("after each aggregate", "after each step"):
                shards = begin(folder, least)
                assert shards.pending == (round, packet)
        assert shards.took(select_shards(packet, [0, 1], 2))
        assert not shards.took(select_shards(packet, [0], 2))
        if round == 4:
            shards.undo()
        else:
            shards.settle()
        if dies in ("after each commit", "after each step"):
            shards = begin(folder, least)
            if shards.pending is not None:  # what became of it was heard, and is asked again
                shards.settle()
    return shards


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["e is saved often", "all is logged"])
@pytest.mark.parametrize("dies", DIES)
def test_whenever_it_is_killed_its_error_is_what_it_would_have_been(
    dies: str, least: int, tmp_path: Path
) -> None:
    undisturbed, shards = lives(tmp_path / "never", "never"), lives(tmp_path / "dies", dies, least)

    assert list(shards.aggregator.assigned) == [1]
    assert error_of(shards).any()
    assert torch.equal(error_of(shards), error_of(undisturbed))
    again = [one.aggregate(ROUNDS, its_part(ROUNDS), ()) for one in (undisturbed, shards)]
    assert again[0] == again[1]


def test_what_is_handed_over_stays_until_the_hub_has_it(tmp_path: Path) -> None:
    shards = lives(tmp_path, "never")
    error = error_of(shards)
    given = shards.own([0])
    back = begin(tmp_path)

    assert torch.equal(settled_error(back), error)
    assert back.own([0]) == given
    back.handed()
    back = begin(tmp_path)
    assert list(back.aggregator.assigned) == [0]
    assert back.own([]) == b"", "there was nothing in it"
    back.handed()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0], "who owns nothing keeps nothing"


def test_a_shard_that_is_owned_again_before_its_error_was_handed_over_has_both(tmp_path: Path) -> None:
    shards = lives(tmp_path, "never")
    old = error_of(shards)
    shards.own([])
    shards.own([1])
    shards.aggregate(ROUNDS, its_part(ROUNDS), ())
    shards.settle()
    back = begin(tmp_path)
    back.settle()

    assert torch.allclose(error_of(back), error_of(shards) + old, atol=1e-5)


def test_a_part_that_cannot_be_used_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    shards = begin(tmp_path)
    shards.own([1])
    with pytest.raises(UpdateRejected, match="eve"):
        shards.aggregate(0, [("eve", b"nonsense", 1.0)], ())

    assert shards.pending is None
    assert begin(tmp_path).pending is None


def test_what_the_disk_has_no_room_for_has_not_moved_e(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = lives(tmp_path, "never")
    error, size = error_of(shards), shards.records.stat().st_size

    def full(fd: int) -> None:
        raise OSError(ENOSPC, strerror(ENOSPC))

    with monkeypatch.context() as context:
        context.setattr("transport.ledger.packet_log.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            shards.aggregate(ROUNDS, its_part(ROUNDS), ())

    assert shards.pending is None
    assert torch.equal(error_of(shards), error)
    assert torch.equal(error_of(shards), settled_error(begin(tmp_path)))
    assert shards.records.stat().st_size == size


def test_damaged_records_are_told_of(tmp_path: Path) -> None:
    shards = lives(tmp_path, "never")
    shards.close()
    damaged = bytearray(shards.records.read_bytes())
    damaged[100] ^= 1
    shards.records.write_bytes(damaged)

    with pytest.raises(ValueError, match="torn or damaged"):
        begin(tmp_path)
