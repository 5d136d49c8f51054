"""The errors of a peer's shards survive its death, at whichever step of a round."""

from __future__ import annotations

from errno import ENOSPC
from os import strerror
from pathlib import Path

import pytest
import torch
from test_durable_aggregator import MIX, SEED, P, legacies_before, updates_of

from cocktail_cli.aggregation.durable_aggregator import DurableShards
from recipes.algorithm.aggregator import Aggregator
from recipes.algorithm.decoded_updates import select_shards
from transport.protocol.errors import UpdateRejected

ROUNDS = 6
DIES = ("never", "after each aggregate", "after each commit", "after each step")


def begin(folder: Path, least: int = 1 << 20) -> DurableShards:
    kept = DurableShards(Aggregator(P, MIX, SEED, assigned=()), folder / "ann@hub", least)
    kept.recover()
    return kept


def error_of(kept: DurableShards) -> torch.Tensor:
    return torch.cat([owner.error for _, owner in sorted(kept.aggregator.assigned.items())])


def kept_error(back: DurableShards) -> torch.Tensor:
    """Of one that was just started, and heard what became of its newest aggregate."""
    if back.pending is not None:
        back.settle()
    return error_of(back)


def its_part(round: int, salt: int = 0) -> list[tuple[str, bytes, float]]:
    """What two peers bring the owner of shard 1."""
    return [(peer, select_shards(packet, [1], 2), weight) for peer, packet, weight in updates_of(round, salt)]


def lives(folder: Path, dies: str, least: int = 1 << 20) -> DurableShards:
    """Some rounds, of which the third is closed twice and the fifth is not committed; a process that dies
    ends without a word, and another one takes its place."""
    kept = begin(folder, least)
    kept.own([1])
    for round in range(ROUNDS):
        for attempt in range(2 if round == 2 else 1):
            if attempt:
                kept.undo()
            packet = kept.aggregate(round, its_part(round, attempt), legacies_before(round))
            if dies in ("after each aggregate", "after each step"):
                kept = begin(folder, least)
                assert kept.pending == (round, packet)
        assert kept.took(select_shards(packet, [0, 1], 2))
        assert not kept.took(select_shards(packet, [0], 2))
        if round == 4:
            kept.undo()
        else:
            kept.settle()
        if dies in ("after each commit", "after each step"):
            kept = begin(folder, least)
            if kept.pending is not None:  # what became of it was heard, and is asked again
                kept.settle()
    return kept


@pytest.mark.parametrize("least", [0, 1 << 20], ids=["e is saved often", "all is logged"])
@pytest.mark.parametrize("dies", DIES)
def test_whenever_it_is_killed_its_error_is_what_it_would_have_been(
    dies: str, least: int, tmp_path: Path
) -> None:
    undisturbed, kept = lives(tmp_path / "never", "never"), lives(tmp_path / "dies", dies, least)

    assert list(kept.aggregator.assigned) == [1]
    assert error_of(kept).any()
    assert torch.equal(error_of(kept), error_of(undisturbed))
    again = [one.aggregate(ROUNDS, its_part(ROUNDS), ()) for one in (undisturbed, kept)]
    assert again[0] == again[1]


def test_what_is_handed_over_stays_until_the_hub_has_it(tmp_path: Path) -> None:
    kept = lives(tmp_path, "never")
    error = error_of(kept)
    given = kept.own([0])
    back = begin(tmp_path)

    assert torch.equal(kept_error(back), error)
    assert back.own([0]) == given
    back.handed()
    back = begin(tmp_path)
    assert list(back.aggregator.assigned) == [0]
    assert back.own([]) == b"", "there was nothing in it"
    back.handed()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0], "who owns nothing keeps nothing"


def test_a_shard_that_is_owned_again_before_its_error_was_handed_over_has_both(tmp_path: Path) -> None:
    kept = lives(tmp_path, "never")
    old = error_of(kept)
    kept.own([])
    kept.own([1])
    kept.aggregate(ROUNDS, its_part(ROUNDS), ())
    kept.settle()
    back = begin(tmp_path)
    back.settle()

    assert torch.allclose(error_of(back), error_of(kept) + old, atol=1e-5)


def test_a_part_that_cannot_be_used_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    kept = begin(tmp_path)
    kept.own([1])
    with pytest.raises(UpdateRejected, match="eve"):
        kept.aggregate(0, [("eve", b"nonsense", 1.0)], ())

    assert kept.pending is None
    assert begin(tmp_path).pending is None


def test_what_the_disk_has_no_room_for_has_not_moved_e(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = lives(tmp_path, "never")
    error, size = error_of(kept), kept.records.stat().st_size

    def full(fd: int) -> None:
        raise OSError(ENOSPC, strerror(ENOSPC))

    with monkeypatch.context() as context:
        context.setattr("transport.ledger.packet_log.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            kept.aggregate(ROUNDS, its_part(ROUNDS), ())

    assert kept.pending is None
    assert torch.equal(error_of(kept), error)
    assert torch.equal(error_of(kept), kept_error(begin(tmp_path)))
    assert kept.records.stat().st_size == size


def test_damaged_records_are_told_of(tmp_path: Path) -> None:
    kept = lives(tmp_path, "never")
    kept.close()
    damaged = bytearray(kept.records.read_bytes())
    damaged[100] ^= 1
    kept.records.write_bytes(damaged)

    with pytest.raises(ValueError, match="torn or damaged"):
        begin(tmp_path)
