"""Bounds on what liars do to the aggregate of a round, and on what its defence costs honest peers."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from collected import collected
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress import Cocktail, decode
from recipes.algorithm import HELD, Aggregator, GlobalModel, RejectedUpdate, Worker, median_of
from recipes.algorithm.robust_mean import OPEN, REFUSED, Rule, middle

M = 600
ALL = Cocktail(random_ratio=1.0, topk_ratio=1.0, quant_bits=32)
SPARSE = Cocktail(random_ratio=1.0, topk_ratio=0.2, quant_bits=8)
RULES = {kind: Rule(kind) for kind in ("mean", "median")}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())

Updates = list[tuple[str, bytes, float]]


def normal(seed: int, norm: float = 1.0, m: int = M) -> Tensor:
    v = torch.randn(m, generator=torch.Generator().manual_seed(seed))
    return norm * v / v.norm()


def said(vectors: Sequence[Tensor], mix: Cocktail = ALL) -> Updates:
    """These vectors as a round's packets, of p00, p01 ... with equal weight."""
    return [(f"p{i:02}", mix.encode(v).packet, 1.0) for i, v in enumerate(vectors)]


def swarm(liars: Sequence[Tensor], honest: int) -> Updates:
    """The liars first, by name; the honest ones agree but for some noise."""
    return said([*liars, *(normal(0) + normal(i, 0.3) for i in range(1, honest + 1))])


# ---- norms -------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    honest=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=12),
    lies=st.lists(st.one_of(st.just(0.0), st.floats(0, 1e38)), max_size=11),
)
def test_fewer_liars_than_honest_peers_leave_the_median_among_the_honest(
    honest: list[float], lies: list[float]
) -> None:
    lies = lies[: len(honest) - 1]

    assert min(honest) <= median_of(lies + honest) <= max(honest)


@pytest.mark.parametrize(("wide", "scales"), [(1.0, [HELD / 2.5]), (1.2, [HELD * 1.2**0.5 / 2.5]), (2.0, [])])
def test_a_packet_with_fewer_values_may_be_longer_within_what_the_recipe_bounds(
    wide: float, scales: list[float]
) -> None:
    usual, few = torch.ones(160), torch.zeros(160)
    few[:10] = 10.0  # 2.5 times as long, 16 times fewer values
    updates = [*said([usual, usual]), ("p02", Cocktail(1.0, 10 / 160, quant_bits=32).encode(few).packet, 1.0)]

    held = collected(torch.zeros(160), updates, Rule(spread=wide)).shortened

    assert [taken.scale for taken in held] == pytest.approx(scales)


@pytest.mark.parametrize(("liars", "honest"), [(1, 2), (2, 8)])
def test_what_is_too_long_is_held_to_a_multiple_of_the_median(liars: int, honest: int) -> None:
    updates = swarm([normal(50 + i, 10.0) for i in range(liars)], honest)
    found = collected(torch.zeros(M), updates, Rule())

    assert [t.peer for t in found.shortened] == [f"p{i:02}" for i in range(liars)]
    for taken in found.shortened:
        assert taken.scale * taken.norm == pytest.approx(HELD * taken.median)
        assert "its norm 10 is more than 2 times the round's median 1.0" in taken.why
    n, held = liars + honest, liars * HELD * found.shortened[0].median
    assert float(found.D.norm()) <= held / n + honest * 1.2 / n


@pytest.mark.parametrize("factor", [1.0, 1e3, 1e12])
def test_what_no_honest_peer_reaches_is_refused_with_norm_and_median(factor: float) -> None:
    updates = swarm([normal(50, 1.5 * REFUSED * factor)], 4)
    aggregator = Aggregator(M, ALL, 0)

    with pytest.raises(
        RejectedUpdate, match=r"norm \S+ is more than 20 times 1\.\d+, the median .* 5 packets"
    ):
        aggregator.step(0, updates)
    assert not aggregator.assigned[0].error.any()
    aggregator.step(0, updates[1:])
    assert aggregator.shortened == ()


def test_a_slow_peer_is_not_refused_for_a_median_that_falls_with_the_learning_rate() -> None:
    aggregator, other, again = (Aggregator(M, SPARSE, 0) for _ in range(3))
    for round in range(50):  # as a linear schedule ends
        for one in (aggregator, other):
            one.step(round, said([normal(i, 1 - round / 50) for i in range(4)], SPARSE))
    late = said([normal(9, 1.0), *(normal(i, 0.02) for i in range(3))], SPARSE)

    packet = aggregator.step(50, late)
    again.replay(50, late, packet)

    assert [held.peer for held in aggregator.shortened] == ["p00"]
    with pytest.raises(RejectedUpdate, match="p00 is refused: its norm"):
        Aggregator(M, SPARSE, 0).step(50, late)
    with pytest.raises(RejectedUpdate, match="p00 is refused: its norm"):
        other.step(50, said([normal(9, 30.0), *(normal(i, 0.02) for i in range(3))], SPARSE))


def test_peers_of_before_are_not_refused_where_newcomers_are_more() -> None:
    aggregator, before = Aggregator(M, SPARSE, 0), [normal(i, 1.0) for i in range(2)]
    for round in range(5):
        aggregator.step(round, said(before, SPARSE))

    aggregator.step(5, said([*before, *(normal(9 + i, 0.02) for i in range(6))], SPARSE))

    assert [held.peer for held in aggregator.shortened] == ["p00", "p01"]


def test_values_that_are_finite_and_a_norm_that_is_not_are_refused_even_of_a_single_peer() -> None:
    long = torch.full((M,), 3e38)

    with pytest.raises(RejectedUpdate, match="p00 is refused: its values are finite and their norm is not"):
        collected(torch.zeros(M), said([long]), Rule())


@every_rule
def test_a_first_round_in_which_nothing_is_sent_refuses_nobody(rule: Rule) -> None:
    found = collected(torch.zeros(M), said([torch.zeros(M)] * 5), rule)

    assert not found.D.any()
    assert found.shortened == ()


def test_where_most_have_sent_nothing_nobody_is_refused_and_nobody_moves_the_model() -> None:
    found = collected(torch.zeros(M), said([normal(1, 1e30), *[torch.zeros(M)] * 4]), Rule())

    assert [t.scale for t in found.shortened] == [0.0]
    assert not found.D.any()


def test_two_peers_have_no_median_worth_the_name() -> None:
    found = collected(torch.zeros(M), said([normal(1), normal(2, 100.0)]), Rule())

    torch.testing.assert_close(found.D, (normal(1) + normal(2, 100.0)) / 2)


def test_weights_shape_the_mean_and_not_the_norms() -> None:
    vectors = [normal(1), normal(2), normal(3, 3.0)]
    updates = [
        (name, p, weight) for (name, p, _), weight in zip(said(vectors), (98.0, 1.0, 1.0), strict=True)
    ]
    found = collected(torch.zeros(M), updates, Rule())

    want = 0.98 * vectors[0] + 0.01 * vectors[1] + 0.01 * vectors[2] * (HELD / 3)
    torch.testing.assert_close(found.D, want, rtol=1e-4, atol=1e-7)


@every_rule
def test_the_aggregator_replays_a_round_with_liars_to_the_bit(rule: Rule) -> None:
    mix = Cocktail(random_ratio=0.5, topk_ratio=0.2, quant_bits=4, block_size=16)
    here, again = Aggregator(M, mix, 7, rule), Aggregator(M, mix, 7, rule)
    for t in range(4):
        m = mix.draw(M, 7, t).m
        vectors = [normal(100 * t + i, 8.0 if i < 2 else 1.0, m) for i in range(7)]
        updates = [(name, p, 0.5 + i) for i, (name, p, _) in enumerate(said(vectors, mix))]
        packet = here.step(t, updates)
        again.replay(t, updates[::-1], packet)

        assert len(here.shortened) == 2
        assert torch.equal(
            here.assigned[0].error.view(torch.int32), again.assigned[0].error.view(torch.int32)
        )


# ---- rules -------------------------------------------------------------------------------------------------


@every_rule
def test_peers_that_agree_get_what_they_said_and_the_error_beside_it(rule: Rule) -> None:
    error, v = normal(9), normal(1)

    torch.testing.assert_close(collected(error, said([v] * 5), rule).D, error + v, rtol=1e-5, atol=1e-7)


@every_rule
def test_nothing_of_what_the_rule_makes_is_lost_at_the_aggregator(rule: Rule) -> None:
    """Law 3 at the aggregator: A(packets) + e = the change of x' + e'."""
    mix = Cocktail(random_ratio=0.5, topk_ratio=0.2, quant_bits=4, block_size=16)
    aggregator = Aggregator(M, mix, 7, rule)
    for t in range(3):
        sample, before = mix.draw(M, 7, t), aggregator.assigned[0].error.clone()
        updates = said([normal(10 * t + i, m=sample.m) for i in range(5)], mix)
        made = collected(torch.zeros(sample.m), updates, rule).D
        packet = aggregator.step(t, updates)
        change = sample.add_(torch.zeros(M), decode(packet, sample.m))

        want = sample.put_(torch.zeros(M), made) + before
        torch.testing.assert_close(change + aggregator.assigned[0].error, want, rtol=0, atol=1e-6)


def test_the_median_is_what_it_is_one_coordinate_at_a_time() -> None:
    """Against a loop over coordinates, for packets that leave coordinates out."""
    vectors = [normal(i) for i in range(7)]
    weights = [1.0, 2.0, 0.5, 4.0, 1.0, 3.0, 1.0]
    packets = [SPARSE.encode(v).packet for v in vectors]
    updates = [(f"p{i}", p, w) for i, (p, w) in enumerate(zip(packets, weights, strict=True))]
    found = collected(torch.zeros(M), updates, Rule("median")).D
    sent = [decode(p, M) for p in packets]

    for j in range(M):
        said = sorted(
            (float(u.values[u.positions == j]), w / sum(weights))
            for u, w in zip(sent, weights, strict=True)
            if bool((u.positions == j).any())
        )
        n = len(said)
        cut = max(0, (n - 1) // 2)
        stays = said[cut : n - cut]
        left = sum(w for _, w in stays)
        want = sum(v * w for v, w in stays) / left * sum(w for _, w in said) if n else 0.0
        assert float(found[j]) == pytest.approx(want, rel=1e-5, abs=1e-9)


def test_a_coordinate_that_one_or_two_peers_sent_is_what_the_mean_makes_of_it() -> None:
    """A peer that has not sent it counts as zero, as in the mean: its residual still has it."""
    sent = np.full((2, 10), np.nan, np.float32)
    sent[0, 3] = 5.0
    sent[1, 3:5] = 5.0, -1.0

    assert middle(sent, np.full(10, 0.1)) == pytest.approx([0.5, 0.4])


def test_two_liars_of_ten_move_the_median_less_than_the_mean() -> None:
    """Sign-flipped, as long as the bound on norms lets through."""
    updates = swarm([-2 * normal(0), -2 * normal(0)], 8)
    honest = collected(torch.zeros(M), updates[2:], OPEN).D

    def off(rule: Rule) -> float:
        return float((collected(torch.zeros(M), updates, rule).D - honest).norm())

    assert off(Rule()) > 0.4
    assert off(RULES["median"]) < 0.6 * off(Rule())


def test_what_the_median_holds_in_memory_does_not_grow_with_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recipes.algorithm.robust_mean.AT_ONCE", 1 << 13)
    monkeypatch.setattr("recipes.algorithm.robust_mean.ROOM", 0)
    packets = said([normal(i, m=1 << 14) for i in range(4)], SPARSE)

    def peak(peers: int) -> int:
        updates = [(f"p{i:02}", packets[i % 4][1], 1.0) for i in range(peers)]
        tracemalloc.start()
        collected(torch.zeros(1 << 14), updates, RULES["median"])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(4)
    assert peak(16) < 1.5 * peak(4)


# ---- a run -------------------------------------------------------------------------------------------------


def trained(rule: Rule, liars: int) -> float:
    """The loss of x' after 30 rounds of least squares: 10 peers with noisy gradients, the first of them send
    ten times the opposite of what they found."""
    mix, n = Cocktail(random_ratio=0.5, topk_ratio=0.4, quant_bits=4, block_size=16), 200
    target, generator = normal(3, 10.0, n), torch.Generator().manual_seed(4)
    workers = [Worker(torch.zeros(n), GlobalModel(torch.zeros(n), mix, 7)) for _ in range(10)]
    aggregator = Aggregator(n, mix, 7, rule)
    for t in range(30):
        parts = [worker.start() for worker in workers]
        lies = [mix.encode(-10 * part.shard_updates[0].update.dense()).packet for part in parts[:liars]]
        packets = lies + [part.packet for part in parts[liars:]]
        packet = aggregator.step(t, [(f"p{i}", p, 1.0) for i, p in enumerate(packets)])
        for worker, part in zip(workers, parts, strict=True):
            worker.x.sub_(0.1 * (worker.x - target + torch.randn(n, generator=generator)))
            worker.finish(packet, part)
    return float((workers[-1].global_model.vector - target).square().mean())


def test_two_liars_of_ten_ruin_a_run_slow_it_or_cost_little_by_the_rule_of_its_aggregator() -> None:
    honest = trained(OPEN, 0)

    assert trained(Rule(), 0) == honest, "nobody honest is held"
    assert trained(OPEN, 2) > 100 * honest
    assert honest < trained(Rule("median"), 2) < trained(Rule(), 2) < 100 * honest
