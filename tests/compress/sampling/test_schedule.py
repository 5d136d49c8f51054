"""A round visits as much as p says, the same on every peer, and everything exactly once an epoch."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import Cocktail, Sample, Update, decode


def visited(s: Sample) -> list[int]:
    return s.coordinates(torch.arange(s.m)).tolist()


def some(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40)
@given(
    n=st.integers(1, 5000),
    parts=st.integers(1, 20),
    kind=st.sampled_from(["block", "element"]),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
)
def test_with_p_of_one_nth_an_epoch_visits_every_coordinate_exactly_once(
    n: int, parts: int, kind: str, seed: int, epoch: int
) -> None:
    mix = Cocktail(random_ratio=1 / parts, sample_kind=kind, block_size=16)

    seen = [i for r in range(parts) for i in visited(mix.draw(n, seed, epoch * parts + r))]

    assert sorted(seen) == list(range(n))


@settings(max_examples=40)
@given(
    n=st.integers(200, 5000),
    share=st.fractions(Fraction(1, 20), Fraction(1), max_denominator=40),
    kind=st.sampled_from(["block", "element"]),
)
def test_with_any_p_every_window_between_redraws_visits_each_coordinate_once(
    n: int, share: Fraction, kind: str
) -> None:
    """p = a / b: b rounds are a epochs. Cut the b rounds into epochs: each holds every coordinate once."""
    mix = Cocktail(random_ratio=float(share), sample_kind=kind, block_size=8)

    samples = [mix.draw(n, 3, r) for r in range(share.denominator)]

    counts = np.bincount([i for s in samples for i in visited(s)], minlength=n)
    assert (counts == share.numerator).all()
    for first in range(share.denominator):
        window: list[int] = []
        for s in samples[first:]:
            fits = len(window) + s.m <= n
            if not fits:
                break
            window += visited(s)
        assert len(window) == len(set(window))


@pytest.mark.parametrize("kind", ["block", "element"])
@pytest.mark.parametrize("p", [0.05, 0.1, 0.15, 1 / 3, 0.4, 0.7, 0.95, 1.0])
def test_p_is_honoured_and_not_only_one_over_an_integer(p: float, kind: str) -> None:
    n = 100_003
    sizes = [Cocktail(random_ratio=p, sample_kind=kind).draw(n, 1, r).m for r in range(7)]

    assert all(abs(m / n - p) < 0.005 * p + 300 / n for m in sizes)


def test_a_new_order_is_drawn_when_the_ring_is_back_at_its_start() -> None:
    mix = Cocktail(random_ratio=0.25)

    assert visited(mix.draw(10_000, 1, 0)) != visited(mix.draw(10_000, 1, 4))
    assert visited(mix.draw(10_000, 1, 0)) != visited(mix.draw(10_000, 2, 0))
    assert visited(mix.draw(10_000, 1, 0)) == visited(mix.draw(10_000, 1, 0))


def test_positions_ascend_and_blocks_stay_whole() -> None:
    s = Cocktail(random_ratio=0.1, block_size=64).draw(100_000, 5, 9)
    at = np.array(visited(s))

    assert (np.diff(at) > 0).all()
    assert s.block_size == 64
    assert all(len(set(row // 64)) == 1 for row in at[: len(at) // 64 * 64].reshape(-1, 64))


def test_small_vectors_get_smaller_blocks_so_that_rounds_stay_even() -> None:
    sizes = [Cocktail(random_ratio=0.1, block_size=4096).draw(20_000, 1, r).m for r in range(10)]

    assert min(sizes) > 1900
    assert max(sizes) < 2100


def test_the_last_short_block_is_visited_like_any_other() -> None:
    n = 64 * 1000 + 37
    mix = Cocktail(random_ratio=0.5, block_size=64)
    x = some(n)
    halves = [mix.draw(n, 1, r) for r in (0, 1)]

    assert sum(s.m for s in halves) == n
    assert sorted(s.m % 64 for s in halves) == [0, 37]
    for s in halves:
        assert torch.equal(s.take(x), x[visited(s)])


@pytest.mark.parametrize("kind", ["block", "element"])
@pytest.mark.parametrize("n", [1, 2, 63, 1000, 100_003])
def test_take_difference_and_put_agree_with_plain_indexing(n: int, kind: str) -> None:
    s = Cocktail(random_ratio=0.3, sample_kind=kind, block_size=32).draw(n, 4, 2)
    x, y, at = some(n), some(n, 1), visited(s)

    assert torch.equal(s.take(x), x[at])
    assert torch.equal(s.difference(x, y), x[at] - y[at])

    put, want = x.clone(), x.clone()
    s.put_(put, y[at])
    want[at] = y[at]
    assert torch.equal(put, want)


def test_add_touches_only_what_was_sent() -> None:
    n = 50_000
    s = Cocktail().draw(n, 1, 3)
    x = some(n)
    update = decode(Cocktail().encode(s.take(some(n, 2))).packet, s.m)

    added = s.add_(x.clone(), update)

    at = s.coordinates(update.positions)
    untouched = torch.ones(n, dtype=torch.bool)
    untouched[at] = False
    assert torch.equal(added[untouched], x[untouched])
    assert torch.equal(added[at], x[at] + update.values)
    assert torch.equal(s.add_(x.clone(), update, alpha=-1)[at], x[at] - update.values)


@pytest.mark.parametrize(
    "mix", [Cocktail(), Cocktail(random_ratio=0.3, block_size=64), Cocktail(random_ratio=1.0)]
)
def test_positions_are_the_inverse_of_coordinates_and_leave_out_what_is_not_visited(mix: Cocktail) -> None:
    n = 50_001  # the last block is short
    s, every = mix.draw(n, 1, 3), torch.arange(n).flip(0)

    positions, visited = s.positions(every)

    assert torch.equal(s.coordinates(positions), every[visited])
    assert torch.equal(every[visited].flip(0), s.coordinates(torch.arange(s.m)))


def test_at_p_of_one_the_sample_is_the_vector() -> None:
    s = Cocktail(random_ratio=1.0).draw(1000, 5, 6)
    x = some(1000)

    assert s.m == s.n == 1000
    assert torch.equal(s.take(x), x)


def test_a_vector_of_another_length_is_refused_with_both_numbers() -> None:
    s = Cocktail().draw(1000, 1, 1)

    with pytest.raises(ValueError, match=r"1,000.*\(999,\)"):
        s.take(torch.zeros(999))
    with pytest.raises(ValueError, match="float32"):
        s.difference(torch.zeros(1000), torch.zeros(1000, dtype=torch.float64))
    with pytest.raises(ValueError, match="alpha 2"):
        s.add_(torch.zeros(1000), Update(s.m, torch.tensor([0]), torch.tensor([1.0])), alpha=2)
    with pytest.raises(ValueError, match="5 sampled elements"):
        s.add_(torch.zeros(1000), Update(5, torch.tensor([0]), torch.tensor([1.0])))


def test_the_sample_of_a_round_is_the_one_in_the_specification() -> None:
    """Golden: peers of different versions must visit the same coordinates."""
    s = Cocktail(random_ratio=0.3, block_size=4).draw(1000, 2026, 7)

    assert s.m == 300
    assert s.units[:8].tolist() == [11, 13, 14, 19, 20, 21, 27, 30]


@settings(max_examples=40)
@given(
    n=st.integers(1, 5000),
    p=st.sampled_from([1.0, 0.5, 0.3, 0.1, 2 / 7, 0.003]),
    block=st.sampled_from([1, 4, 64, 256]),
    kind=st.sampled_from(["block", "element", "fragment"]),
    seed=st.integers(0, 2**64 - 1),
    round=st.integers(0, 1000),
    window=st.integers(1, 600),
)
def test_windows_of_the_schedule_put_together_are_the_sample(
    n: int, p: float, block: int, kind: str, seed: int, round: int, window: int
) -> None:
    mix = Cocktail(random_ratio=p, block_size=block, sample_kind=kind)
    whole = mix.draw(n, seed, round)

    plan = mix.schedule(n, seed, round)
    parts = [
        start + plan.visited(plan.places(start, min(start + window, plan.count)))
        for start in range(0, plan.count, window)
    ]

    assert (plan.m, plan.block_size) == (whole.m, whole.block_size)
    assert np.concatenate(parts).tolist() == whole.units.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_copy_a_sample_as_one_does_to_wherever_it_is_wanted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.sampling.TAKEN", 1 << 10)
    x, threads = (
        torch.randn(70_001, generator=torch.Generator().manual_seed(1)).to(dtype),
        torch.get_num_threads(),
    )
    sample = Cocktail(random_ratio=0.5).draw(len(x), 1, 3)
    wanted = x[sample.coordinates(torch.arange(sample.m))]
    out = torch.zeros_like(wanted)
    torch.set_num_threads(3)
    try:
        assert sample.take(x, out) is out
        assert torch.equal(sample.take(x), wanted)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(out, wanted)
