"""The family: each preset is tested for what its paper defines it by, on vectors and without a network."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress import Cocktail, decode
from recipes.algorithm import (
    Aggregator,
    DecodedPacket,
    GlobalModel,
    Worker,
    compressor_of,
    outer_optimizer_of,
)
from recipes.config import Compression, Recipe

SEED, N, PEERS = 7, 600, 3


class Trio:
    """Peers of one preset and their aggregator; each pulls towards an optimum of its own, by plain SGD."""

    def __init__(self, rate: float = 0.1, **compression: object) -> None:
        self.asked, self.rate = Compression.model_validate(compression), rate
        generator = torch.Generator().manual_seed(1)
        x0 = torch.randn(N, generator=generator)
        self.optima = [x0 + torch.randn(N, generator=generator) for _ in range(PEERS)]
        mix, decay = compressor_of(self.asked), self.asked.error_decay
        self.workers = [
            Worker(x0.clone(), GlobalModel(x0.clone(), mix, SEED), decay=decay) for _ in range(PEERS)
        ]
        self.aggregator = Aggregator(N, mix, SEED, outer=outer_optimizer_of(self.asked))
        self.sent: list[DecodedPacket] = []
        self.taken: list[tuple[str, bytes, float]] = []

    @property
    def common(self) -> Tensor:
        return self.workers[0].global_model.vector

    @property
    def error(self) -> Tensor:
        return torch.cat([aggregator.error for aggregator in self.aggregator.assigned.values()])

    def steps(self) -> None:
        for worker, optimum in zip(self.workers, self.optima, strict=True):
            for _ in range(self.asked.local_steps):
                worker.x.sub_(self.rate * (worker.x - optimum))

    def round(self, late: Collection[int] = (), weights: Sequence[float] = (1.0,) * PEERS) -> bytes:
        """`late`: whose packets are not taken."""
        if self.asked.staleness:
            sent = [worker.start() for worker in self.workers]
            self.steps()
        else:
            self.steps()
            sent = [worker.start() for worker in self.workers]
        self.sent = sent
        round = self.workers[0].global_model.round
        self.taken = [(str(i), s.packet, weights[i]) for i, s in enumerate(sent) if i not in late]
        packet = self.aggregator.step(round, self.taken)
        for i, (worker, part) in enumerate(zip(self.workers, sent, strict=True)):
            worker.finish(packet, None if i in late else part)
        return packet


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


# ---- what defines each -----------------------------------------------------------------------------------


def test_allreduce_is_synchronous_sgd() -> None:
    """After each round x' and all x_i are what one SGD step on the mean gradient makes."""
    trio = Trio(preset="allreduce", quant_bits=32)
    plain, mean = trio.common.clone(), torch.stack(trio.optima).mean(0)
    for _ in range(10):
        plain -= 0.1 * (plain - mean)
        trio.round()

        close(trio.common, plain)
        for worker in trio.workers:
            close(worker.x, plain)


def test_local_sgd_averages_models_after_h_steps_of_each() -> None:
    trio = Trio(preset="local-sgd", quant_bits=32)
    assert trio.asked.local_steps == 8
    for _ in range(3):
        alone = [trio.common.clone() for _ in trio.optima]
        for x, optimum in zip(alone, trio.optima, strict=True):
            for _ in range(8):
                x -= 0.1 * (x - optimum)
        trio.round()

        close(trio.common, torch.stack(alone).mean(0))
        close(trio.workers[2].x, trio.common)


def test_diloco_is_torchs_nesterov_on_the_mean_of_what_h_local_steps_did() -> None:
    trio = Trio(preset="diloco", quant_bits=32, local_steps=5)
    outer = trio.common.clone().requires_grad_()
    nesterov = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(8):
        alone = [outer.detach().clone() for _ in trio.optima]
        for x, optimum in zip(alone, trio.optima, strict=True):
            for _ in range(5):
                x -= 0.1 * (x - optimum)
        outer.grad = outer.detach() - torch.stack(alone).mean(0)
        nesterov.step()
        trio.round()

        torch.testing.assert_close(trio.common, outer.detach(), rtol=0, atol=2e-5)


def test_diloco_with_one_local_step_and_plain_sgd_outside_is_averaging() -> None:
    diloco = Trio(preset="diloco", local_steps=1, outer_learning_rate=1.0, outer_momentum=0.0)
    allreduce = Trio(preset="allreduce")

    for _ in range(5):
        assert diloco.round() == allreduce.round()
        assert torch.equal(diloco.common, allreduce.common)


def test_streaming_diloco_sends_each_fragment_once_in_h_steps_and_one_range_of_layers_at_a_time() -> None:
    trio = Trio(preset="streaming-diloco", rate=0.01)
    rounds = round(1 / trio.asked.random_ratio)
    assert rounds * trio.asked.local_steps == 100  # H of the paper
    for cycle in range(2):
        seen = []
        for _ in range(rounds):
            trio.round()
            [piece] = trio.sent[0].shard_updates
            seen.append(piece.sample.coordinates(torch.arange(piece.sample.m)))
        for fragment in seen:
            assert torch.equal(fragment, torch.arange(int(fragment[0]), int(fragment[0]) + len(fragment)))
        assert torch.equal(torch.cat(seen), torch.arange(N)), f"cycle {cycle}"


@settings(max_examples=50)
@given(st.integers(1, 5000), st.floats(0.01, 1), st.sampled_from([1, 16, 256]), st.integers(0, 40))
def test_fragments_go_round_the_vector(n: int, p: float, block: int, start: int) -> None:
    """Consecutive rounds are consecutive ranges of the ring, and `schedule` says the same as `draw`."""
    mix, end = Cocktail(random_ratio=p, sample_kind="fragment", block_size=block), None
    for t in range(start, start + 4):
        sample, way = mix.draw(n, SEED, t), mix.schedule(n, SEED, t)
        at = sample.coordinates(torch.arange(sample.m)).numpy()
        ring = np.sort(np.arange(way.first, way.last) % way.count)
        assert np.array_equal(sample.units.numpy(), ring)
        assert np.array_equal(way.visited(np.arange(way.count)), ring)
        assert np.all(np.diff(at) > 0)
        assert way.m == sample.m
        assert end is None or way.count == len(ring) or way.first % way.count == end
        end = way.last % way.count


def test_sparseloco_keeps_the_largest_of_each_chunk_and_what_stays_decays() -> None:
    """e <- beta (e + Delta - Q(TopK(e + Delta))), the paper's error, is x_i - x' here."""
    trio = Trio(preset="sparseloco", topk_chunk=100, topk_ratio=0.03)
    for _ in range(4):
        before = [worker.x.clone() for worker in trio.workers]
        common = trio.common.clone()
        trio.round()
        for i, (worker, part) in enumerate(zip(trio.workers, trio.sent, strict=True)):
            [piece] = part.shard_updates
            chunks = torch.bincount(piece.update.positions // 100, minlength=6)
            assert chunks.tolist() == [3] * 6
            x = before[i]
            for _ in range(30):
                x = x - 0.1 * (x - trio.optima[i])
            stays = x - common - piece.update.dense()
            close(worker.x - trio.common, 0.95 * stays)


def test_dgc_sends_all_at_first_and_then_the_largest_and_tells_what_left_the_residual() -> None:
    trio, left = Trio(preset="dgc", uncompressed_steps=2, topk_ratio=0.01), list[Tensor]()
    trio.workers[0].on_taken = lambda update: left.append(update.update.dense())
    for late in ([], [], [], [0]):
        trio.round(late)
    sizes = [int((values != 0).sum()) for values in left]
    sent = trio.sent[1].shard_updates[0].update
    delta = trio.workers[1].x - trio.common + sent.dense()

    assert trio.asked.momentum_masking
    assert sizes == [N, N, 6]
    assert sent.positions.tolist() == delta.abs().topk(6).indices.sort().values.tolist()


def test_onebit_sends_signs_after_its_first_steps_and_loses_nothing_on_either_side() -> None:
    trio = Trio(preset="onebit", uncompressed_steps=2)
    sizes = []
    for _ in range(5):
        common, error = trio.common.clone(), trio.aggregator.assigned[0].error.clone()
        packet = trio.round()
        sizes.append(len(packet))
        mean = sum(part.shard_updates[0].update.dense() for part in trio.sent) / PEERS
        close(mean + error, trio.common - common + trio.aggregator.assigned[0].error)
    update = decode(packet, N)

    assert len(update.positions) == N
    for bucket in update.values.abs().split(128):
        assert len(bucket.unique()) == 1
    assert sizes[0] == sizes[1] > 7 * sizes[2]


def test_the_cocktails_hide_the_exchange_and_differ_in_what_is_left_out() -> None:
    names = ("cocktail", "cocktail-paper", "cocktail-wide", "lora-cocktail")
    cocktail, paper, wide, lora = all_of_them = [Trio(preset=name) for name in names]
    for trio in all_of_them:
        trio.round(), trio.round()

    assert {trio.asked.staleness for trio in all_of_them} == {1}
    assert wide.sent[0].shard_updates[0].sample.m > 3 * cocktail.sent[0].shard_updates[0].sample.m
    assert len(wide.sent[0].shard_updates[0].update.positions) < len(
        cocktail.sent[0].shard_updates[0].update.positions
    )
    assert len(paper.sent[0].shard_updates[0].update.positions) == round(0.2 * round(0.1 * N / 2) * 2)
    assert len(lora.sent[0].shard_updates[0].update.positions) == N
    assert cocktail.asked.model_dump() == Compression().model_dump()


@pytest.mark.parametrize("written", [{}, {"preset": "cocktail"}, {"preset": "lora-cocktail"}])
def test_adapters_are_sent_whole_whether_a_recipe_says_so_or_not(written: dict[str, object]) -> None:
    asked = {"version": 1, "name": "a", "model": {"model_name_or_path": "m"}, "datasets": [{"path": "d"}]}
    adapters, *others = (
        Recipe.model_validate({**asked, "lora": {}, "compression": {**written, **keys}}).compression
        for keys in ({}, {"topk_ratio": 0.3}, {"preset": "cocktail-paper"})
    )

    apart = {"preset", "auto"}
    assert adapters.model_dump(exclude=apart) == Compression(preset="lora-cocktail").model_dump(exclude=apart)
    assert ("local_steps" in adapters.auto) == (written.get("preset") != "lora-cocktail")
    assert (others[0].topk_ratio, others[0].random_ratio) == (0.3, 1.0)
    assert others[1] == Compression(preset="cocktail-paper")


# ---- the parts ---------------------------------------------------------------------------------------------


MIXES: dict[str, dict[str, object]] = {
    "cocktail": {"sample_kind": "element", "shards": 3},
    "sparse": {"random_ratio": 0.5, "topk_ratio": 0.1, "topk_chunk": 25},
    "fragments": {"sample_kind": "fragment", "random_ratio": 0.3, "topk_ratio": 1.0},
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_an_aggregator_that_is_started_again_has_its_momentum_to_the_bit(
    mix: dict[str, object], tmp_path: Path
) -> None:
    """Saved after round 3, replayed to round 8: e and v, and the packets from there on."""
    trio = Trio(**mix, outer_momentum=0.8, outer_learning_rate=0.5)
    again = Aggregator(N, compressor_of(trio.asked), SEED, outer=outer_optimizer_of(trio.asked))
    for t in range(8):
        packet = trio.round()
        if t == 3:
            trio.aggregator.save(tmp_path / "error", t + 1)
            assert again.load(tmp_path / "error") == 4
        elif t > 3:
            again.replay(t, [(str(i), part.packet, 1.0) for i, part in enumerate(trio.sent)], packet)

    for number, aggregator in trio.aggregator.assigned.items():
        assert aggregator.momentum.any()
        assert torch.equal(aggregator.momentum, again.assigned[number].momentum)
        assert torch.equal(aggregator.error, again.assigned[number].error)


WHOLE: dict[str, object] = {"preset": "allreduce", "quant_bits": 32, "outer_learning_rate": "packets"}


def test_a_step_of_as_many_as_there_are_packets_is_that_number_as_a_step_and_of_one_packet_the_mean() -> None:
    packets, three = Trio(outer_learning_rate="packets"), Trio(outer_learning_rate=3.0)
    for _ in range(3):
        assert packets.round() == three.round()

    alone, mean = Trio(outer_learning_rate="packets"), Trio(outer_learning_rate=1.0)
    for _ in range(3):
        assert alone.round(late=[0, 2]) == mean.round(late=[0, 2])


def test_of_packets_that_weigh_unlike_the_mean_is_taken_as_often_as_there_are_some_with_a_weight() -> None:
    trio = Trio(**WHOLE)
    before = trio.common.clone()
    trio.round(weights=(10.0, 0.0, 30.0))
    one, _, three = (part.shard_updates[0].update.dense() for part in trio.sent)

    close(trio.common, before + 2 * (one / 4 + 3 * three / 4))


@pytest.mark.parametrize("members", [1, 2, 3])
def test_the_swarms_step_is_as_long_however_many_make_it(members: int) -> None:
    """All go for the same optimum, and a step is a fifth of the way there."""
    trio = Trio(**WHOLE)
    outer = outer_optimizer_of(trio.asked)
    trio.rate, trio.optima = 0.2 * outer.peers_share(members), [torch.ones(N)] * PEERS
    before = trio.common.clone()
    trio.round(late=range(members, PEERS))

    close(trio.common, before + 0.2 * (1 - before))
    assert outer_optimizer_of(Compression(preset="diloco")).peers_share(3) == 1


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_sum_is_replayed_to_the_bit_however_many_packets_each_round_had(
    momentum: float, tmp_path: Path
) -> None:
    trio = Trio(outer_learning_rate="packets", outer_momentum=momentum, rate=0.02)
    again = Aggregator(N, compressor_of(trio.asked), SEED, outer=outer_optimizer_of(trio.asked))
    for t, late in enumerate([(), (1,), (0, 2), (), (2,)]):
        packet = trio.round(late, (1000.0, 700.0, 3.0))
        if t == 1:
            trio.aggregator.save(tmp_path / "error", 2)
            again.load(tmp_path / "error")
            assert again.assigned[0].packets == trio.aggregator.assigned[0].packets == 2
        elif t > 1:
            again.replay(t, trio.taken, packet)

    assert torch.equal(trio.error, again.assigned[0].error)
    assert torch.equal(trio.aggregator.assigned[0].momentum, again.assigned[0].momentum)


def test_of_a_sum_nothing_is_lost_and_nothing_counts_twice_whoever_is_late_or_leaves() -> None:
    """x' + e + all that is unsent is x_0 and every step that anybody has made."""
    trio = Trio(random_ratio=0.5, sample_kind="element", outer_learning_rate="packets", rate=0.05)
    start, made = trio.common.double(), torch.zeros(N, dtype=torch.float64)

    def steps() -> None:
        for worker, optimum in zip(trio.workers, trio.optima, strict=True):
            step = 0.05 * (worker.x - optimum)
            worker.x.sub_(step)
            made.sub_(step.double())

    trio.steps = steps  # type: ignore[method-assign]
    for late in ([], [1], [0, 2], [0], []):
        trio.round(late)
    leaver = trio.workers.pop()
    handoff = leaver.handoff(1 << 20)
    assert handoff is not None
    trio.aggregator.merge_handoff("2", handoff.packet, 1 / 3)
    leaver.subtract(handoff)
    unsent = sum((worker.x - trio.common).double() for worker in (*trio.workers, leaver))

    torch.testing.assert_close(trio.common + trio.error + unsent, start + made, rtol=0, atol=1e-5)


def test_an_aggregators_error_that_changes_hands_counts_once_however_many_packets_there_are() -> None:
    trio, heir = Trio(outer_learning_rate="packets"), Trio(outer_learning_rate="packets")
    trio.round(), trio.round(), heir.round(), heir.round()
    before, given = heir.error, trio.error
    assert heir.aggregator.merge_handoff("aggregator", trio.aggregator.assign([]), 1.0) == 1
    assert given.any()

    assert torch.equal(heir.error, before + given)


def test_momentum_moves_only_what_a_round_visits() -> None:
    trio = Trio(preset="streaming-diloco", rate=0.01)
    trio.round(), trio.round()
    [aggregator] = trio.aggregator.assigned.values()
    before = aggregator.momentum.clone()
    trio.round()
    [piece] = trio.sent[0].shard_updates
    inside = piece.sample.coordinates(torch.arange(piece.sample.m))
    outside = torch.ones(N, dtype=torch.bool).index_fill_(0, inside, False)

    assert torch.equal(aggregator.momentum[outside], before[outside])
    assert not torch.equal(aggregator.momentum[inside], before[inside])


def test_with_a_decay_of_0_nothing_stays_of_what_was_visited_and_the_rest_does() -> None:
    """No error feedback at the peers, for who wants to see what it is worth."""
    trio = Trio(random_ratio=0.5, topk_ratio=0.1, quant_bits=32, staleness=0, error_decay=0)
    trio.round()
    [piece] = trio.sent[0].shard_updates
    inside = piece.sample.coordinates(torch.arange(piece.sample.m))
    residual = trio.workers[0].x - trio.common

    close(residual[inside], torch.zeros(piece.sample.m))
    assert (residual.abs() > 1e-6).sum() == N - len(inside)


def test_what_was_not_taken_does_not_decay() -> None:
    trio = Trio(preset="sparseloco")
    trio.steps()
    worker = trio.workers[0]
    part, before = worker.start(), worker.x - worker.global_model.vector
    worker.finish(trio.aggregator.step(0, [("other", part.packet, 1.0)]), None)

    close(worker.x - worker.global_model.vector, before)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_first_steps_are_sent_whole_and_the_walk_goes_on_where_it_would_be(staleness: int) -> None:
    mix = compressor_of(Compression(uncompressed_steps=5, local_steps=2, staleness=staleness))
    whole = 3 + staleness  # rounds; a stale one delivers the steps before it

    assert [mix.draw(N, SEED, t).m == N for t in range(6)] == [t < whole for t in range(6)]
    assert (mix.at(whole - 1).quant_bits, mix.at(whole).quant_bits) == (16, 2)
    later = compressor_of(Compression()).draw(N, SEED, whole)
    assert torch.equal(mix.draw(N, SEED, whole).units, later.units)


def largest_of_each(v: Tensor, chunk: int, count: Callable[[int], int]) -> list[int]:
    found: list[int] = []
    for start in range(0, len(v), chunk):
        part = v[start : start + chunk].abs()
        found += sorted((start + part.topk(count(len(part))).indices).tolist())
    return found


@given(st.integers(1, 400), st.integers(1, 60), st.floats(0.01, 0.99), st.integers(0, 99))
def test_each_chunk_keeps_its_own_largest(m: int, chunk: int, keep: float, seed: int) -> None:
    v = torch.randn(m, generator=torch.Generator().manual_seed(seed))
    packet = Cocktail(topk_ratio=keep, quant_bits=16, topk_chunk=chunk).encode(v).packet

    want = largest_of_each(v, chunk, lambda n: max(round(keep * n), 1))
    assert decode(packet, m).positions.tolist() == want
