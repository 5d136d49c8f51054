"""A vector in shards: what one packet says of each, and what becomes of a shard that does not move."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress import Cocktail, PacketError, decode, join, split
from recipes.algorithm import (
    WRAP,
    AggregateStep,
    Aggregator,
    GlobalModel,
    OuterOptimizer,
    Part,
    RejectedUpdate,
    Worker,
)
from recipes.algorithm.robust_mean import MOST, OPEN

N, SEED = 500, 7
MIX = Cocktail(random_ratio=0.5, topk_ratio=0.4, quant_bits=4, block_size=16, shards=3)
ALONE = Cocktail(random_ratio=0.5, topk_ratio=0.4, quant_bits=4, block_size=16)


def workers(mix: Cocktail = MIX, count: int = 3) -> list[Worker]:
    """Each with a residual, at round 0."""
    noise = torch.Generator().manual_seed(1)
    x0 = torch.randn(N, generator=noise)
    return [
        Worker(x0 + 0.1 * torch.randn(N, generator=noise), GlobalModel(x0.clone(), mix, SEED))
        for _ in range(count)
    ]


def updates_of(peers: list[Worker]) -> list[tuple[str, bytes, float]]:
    return [(f"peer-{i}", worker.start().packet, 1.0 + i) for i, worker in enumerate(peers)]


def test_a_vector_of_one_shard_sends_what_it_sent_before_there_were_shards() -> None:
    [worker, *_] = peers = workers(ALONE)
    sample = ALONE.draw(N, SEED, 0)

    sent = worker.start()
    packet = Aggregator(N, ALONE, SEED).step(0, updates_of(peers))

    assert sent.packet == ALONE.encode(sample.difference(worker.x, worker.global_model.vector)).packet
    assert packet == Aggregator(N, ALONE, SEED).step(0, updates_of(peers))


def test_each_shard_is_a_vector_of_its_own() -> None:
    """Its packet is the one of an aggregator and of peers that know nothing but that range."""
    peers = workers()
    packet = Aggregator(N, MIX, SEED).step(0, updates_of(peers))

    for shard, part in zip(MIX.cut(N, SEED), split(packet, 3), strict=True):
        alone = [
            Worker(
                shard.of(w.x).clone(), GlobalModel(shard.of(w.global_model.vector).clone(), ALONE, shard.seed)
            )
            for w in peers
        ]
        assert part == Aggregator(shard.size, ALONE, shard.seed).step(0, updates_of(alone))


def test_workers_of_parts_are_to_the_aggregator_what_one_of_the_whole_vector_is() -> None:
    """The machines of a replica, the first with both ends: the same packets shard for shard, the same x_i and
    x' to the bit, and fingerprints that add up."""
    mix = replace(MIX, shards=(90, 200, 410, N))
    [whole, *_] = workers(mix)
    parts = []
    for ranges, numbers in (((range(90), range(410, N)), (0, 3)), ((range(90, 410),), (1, 2))):
        x, common = (
            torch.cat([v[r.start : r.stop] for r in ranges]) for v in (whole.x, whole.global_model.vector)
        )
        parts.append((numbers, ranges, Worker(x, GlobalModel(common, mix, SEED, part=Part(ranges, N)))))
    aggregator = Aggregator(N, mix, SEED)
    for round in range(3):
        sent = whole.start()
        packet = aggregator.step(round, [("peer", sent.packet, 1.0)])
        whole.finish(packet, sent)
        for numbers, ranges, worker in parts:
            own = worker.start()
            assert split(own.packet, 2) == [split(sent.packet, 4)[n] for n in numbers]
            worker.finish(join([split(packet, 4)[n] for n in numbers]), own)
            for mine, all_of_it in (
                (worker.x, whole.x),
                (worker.global_model.vector, whole.global_model.vector),
            ):
                assert torch.equal(mine, torch.cat([all_of_it[r.start : r.stop] for r in ranges]))
        both = sum(worker.global_model.fingerprint for *_, worker in parts) & WRAP
        assert both == whole.global_model.fingerprint


def test_a_shard_that_the_aggregate_leaves_out_has_not_moved_and_stays_in_the_residual() -> None:
    [worker, *_] = peers = workers()
    sent = worker.start()
    parts = split(Aggregator(N, MIX, SEED).step(0, updates_of(peers)), 3)
    out = MIX.cut(N, SEED)[1]
    x, common = worker.x.clone(), worker.global_model.vector.clone()

    worker.finish(join([parts[0], b"", parts[2]]), sent)

    assert torch.equal(out.of(worker.x), out.of(x))
    assert torch.equal(out.of(worker.global_model.vector), out.of(common))
    for shard in (s for s in MIX.cut(N, SEED) if s != out):
        assert not torch.equal(shard.of(worker.global_model.vector), shard.of(common))
    again = split(worker.start().packet, 3)[1]
    assert len(decode(again, MIX.draw(out.size, out.seed, 1).m).positions)


def test_a_packet_of_which_one_shard_is_refused_moves_no_error() -> None:
    peers = workers()
    aggregator, updates = Aggregator(N, MIX, SEED), updates_of(peers)
    aggregator.step(0, updates)
    errors = [own.error.clone() for own in aggregator.assigned.values()]
    assert all(bool(error.any()) for error in errors)
    for worker in peers:
        worker.global_model.round = 1
    updates = updates_of(peers)
    parts = split(updates[2][1], 3)

    for bad in (join([*parts[:2], b""]), join([*parts[:2], parts[0]]), parts[0], join(parts)[:-1]):
        with pytest.raises(RejectedUpdate, match="the update of peer-2 is refused"):
            aggregator.step(1, [*updates[:2], ("peer-2", bad, 1.0)])
        with pytest.raises(RejectedUpdate, match="the update of peer-2 is refused"):
            aggregator.merge_handoff("peer-2", bad, 1.0)

    assert all(
        torch.equal(o.error, error) for o, error in zip(aggregator.assigned.values(), errors, strict=True)
    )


def test_a_round_in_which_a_shard_did_not_move_is_replayed_without_it() -> None:
    peers, aggregator, again = workers(), Aggregator(N, MIX, SEED), Aggregator(N, MIX, SEED)
    updates = updates_of(peers)
    parts = split(aggregator.step(0, updates), 3)

    again.replay(0, updates, join([parts[0], b"", parts[2]]))

    assert torch.equal(again.assigned[0].error, aggregator.assigned[0].error)
    assert torch.equal(again.assigned[2].error, aggregator.assigned[2].error)
    assert not again.assigned[1].error.any()


@pytest.mark.parametrize(
    "outer", [OuterOptimizer(), OuterOptimizer(0.7, 0.9)], ids=["plain", "with momentum"]
)
def test_what_a_round_came_to_moves_e_as_its_packets_did(outer: OuterOptimizer) -> None:
    peers, aggregator, again = workers(), *(Aggregator(N, MIX, SEED, outer=outer) for _ in range(2))
    for round in range(3):
        written: list[bytes] = []

        def keep(found: Mapping[int, AggregateStep], to: list[bytes] = written) -> Callable[[], object]:
            to.append(b"".join(aggregator.serialize(found)))
            return lambda: None

        packet = aggregator.step(round, updates_of(peers), keep)
        again.replay_step(round, *written, packet)
        for peer in peers:
            peer.catch_up(packet)

        assert len(written[0]) - aggregator.step_bytes(round) in range(1, 600)
        for number, own in aggregator.assigned.items():
            assert torch.equal(own.error, again.assigned[number].error)
            assert torch.equal(own.momentum, again.assigned[number].momentum)
            assert own.usual == again.assigned[number].usual
    with pytest.raises(ValueError, match="came to is not of these shards"):
        Aggregator(N, MIX, SEED, assigned=[1]).replay_step(0, written[0][:-1], packet)


def test_errors_come_back_from_the_disk_shard_by_shard(tmp_path: Path) -> None:
    aggregator, again = Aggregator(N, MIX, SEED), Aggregator(N, MIX, SEED)
    aggregator.step(0, updates_of(workers()))
    aggregator.save(tmp_path / "errors", 1)

    assert again.load(tmp_path / "errors") == 1
    assert all(torch.equal(own.error, aggregator.assigned[n].error) for n, own in again.assigned.items())
    with pytest.raises(ValueError, match="another number of shards"):
        Aggregator(N, Cocktail(shards=2), SEED).load(tmp_path / "errors")


def test_a_packet_of_another_number_of_shards_leaves_x_prime_as_it_was() -> None:
    [worker, *_] = peers = workers()
    parts = split(Aggregator(N, MIX, SEED).step(0, updates_of(peers)), 3)
    before = worker.global_model.vector.clone()

    for bad in (join(parts[:2]), join([*parts[:2], parts[1]]), parts[0], b""):
        with pytest.raises(PacketError):
            worker.global_model.apply(bad)

    assert torch.equal(worker.global_model.vector, before)
    assert worker.global_model.round == 0


def test_the_largest_of_each_shard_are_handed_over_within_the_room() -> None:
    [worker, *_] = workers()
    before = worker.residual_norm()
    part = worker.handoff(700)

    assert part is not None
    assert len(part.packet) <= 700
    aggregator = Aggregator(N, MIX, SEED, OPEN)
    aggregator.merge_handoff("bob", part.packet, 0.5)
    for shard, own, piece in zip(
        MIX.cut(N, SEED), aggregator.assigned.values(), part.shard_updates, strict=True
    ):
        d = shard.of(worker.x - worker.global_model.vector).abs()
        sent = piece.update.positions
        assert d[sent].min() >= d.sort(descending=True).values[len(sent) - 1]
        assert torch.equal(own.error[sent], 0.5 * piece.update.values)
    worker.subtract(part)
    assert worker.residual_norm() < before


# ---- aggregators of some shards ---------------------------------------------------------------------------


def test_a_shard_that_changes_hands_takes_its_error_along() -> None:
    peers, one, two = workers(), Aggregator(N, MIX, SEED), Aggregator(N, MIX, SEED)
    two.assign([])
    one.step(0, updates_of(peers))
    errors = [own.error.clone() for own in one.assigned.values()]

    assert two.assign([1]) == b"", "there is nothing in it"
    given = one.assign([0, 2])
    two.merge_handoff("one", given, 1.0)
    one.merge_handoff("one", given, 1.0)

    assert torch.equal(two.assigned[1].error, errors[1])
    assert torch.equal(one.assigned[0].error, errors[0])
    assert list(one.assigned) == [0, 2]


@pytest.mark.parametrize("members", [1, 3, MOST, MOST + 1, 64])
def test_beyond_so_many_the_aggregators_step_is_no_longer_and_a_peers_share_no_smaller(members: int) -> None:
    outer = OuterOptimizer("packets")

    assert outer.rate_of(members) == min(members, MOST)
    assert outer.peers_share(members) * outer.rate_of(members) == pytest.approx(1)
    assert outer.handoff_weight(1 / members, members) == (pytest.approx(outer.rate_of(members) / members))
