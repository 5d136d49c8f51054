"""Fitted levels: never worse than a grid, cheap where that is asked, exact where few values exist."""

import numpy as np
import pytest
import torch

from compress.quantization import BUDGET, Levels, far, fit, plan, plans, stretch

RNG = np.random.default_rng(0)


def rows(kind: str) -> np.ndarray:
    """(400, 128) magnitudes that survived a top 20 %, over their mean."""
    m = 400 * 128 * 5
    v = {
        "gaussian": RNG.standard_normal,
        "laplace": lambda n: RNG.laplace(size=n),
        "student": lambda n: RNG.standard_t(3, n),
    }[kind](m)
    kept = np.abs(v)[np.abs(v) >= np.quantile(np.abs(v), 0.8)][: 400 * 128]
    y = np.resize(kept, (400, 128)).astype(np.float32)
    return y / y.mean(1, keepdims=True)


def lost(y: np.ndarray, level: Levels) -> float:
    there = level.at[level.nearest(y.reshape(-1))].reshape(y.shape)
    return float(np.square(y - there).sum() / np.square(y).sum())


def uniform(y: np.ndarray, bits: int) -> float:
    """The max-scaled grid of the reference."""
    half = 2 ** (bits - 1)
    step = y.max(1, keepdims=True) / half
    return float(np.square(y - np.minimum(np.rint(y / step), half - 1) * step).sum() / np.square(y).sum())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
def test_fitted_levels_lose_less_than_a_grid(kind: str, bits: int) -> None:
    y = rows(kind)
    if bits == 8:  # as the packet does it: over the largest
        y = y / y.max(1, keepdims=True)

    assert lost(y, fit(y, np.ones(len(y), np.float32), bits)) < 0.8 * uniform(y, bits)


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
def test_four_bits_keep_to_their_budget(kind: str) -> None:
    y = rows(kind)
    level = fit(y, np.ones(len(y), np.float32), 4)
    share = np.bincount(level.nearest(y.reshape(-1))) / y.size
    share = share[share > 0]

    assert -(share * np.log2(share)).sum() < BUDGET[4] + 0.02


def test_the_reported_error_is_the_real_error() -> None:
    y = rows("laplace")
    level = fit(y, np.ones(len(y), np.float32), 3)

    assert level.error == pytest.approx(lost(y, level), rel=0.01)


def test_as_many_distinct_values_as_levels_are_met_exactly() -> None:
    y = np.resize(np.float32([0.5, 1, 2, 4]), (8, 128))

    level = fit(y, np.ones(8, np.float32), 3)

    assert level.at == pytest.approx([0.5, 1, 2, 4], rel=1e-3)


def test_large_buckets_count_for_more() -> None:
    """The error that matters is that of the values, not of the values over their scale."""
    y = np.stack([np.full(128, 1.0), np.full(128, 2.0)]).astype(np.float32)

    toward_one = fit(y, np.float32([1, 1e-3]), 2).at
    toward_two = fit(y, np.float32([1e-3, 1]), 2).at

    assert min(abs(toward_one - 1)) < 0.01
    assert min(abs(toward_two - 2)) < 0.01


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_zeros_are_fitted_without_an_error(bits: int) -> None:
    level = fit(np.zeros((1, 128), np.float32), np.zeros(1, np.float32), bits)

    assert len(level.at) == 2 ** (bits - 1)
    assert np.isfinite(level.at).all()


def test_a_bucket_with_an_outlier_gets_the_scale_that_serves_it_and_the_others_keep_theirs() -> None:
    y = rows("student")[:200]
    y[1, :4] = 20
    level = fit(rows("laplace"), np.ones(400, np.float32), 3)

    which = far(y, level)
    factor = np.ones(200, np.float32)
    factor[which] = stretch(y[which], level)

    there = level.at[level.nearest(y / factor[:, None])] * factor[:, None]
    unstretched = level.at[level.nearest(y)]
    assert 1 in which
    assert factor[1] > 1
    assert (factor == 1).mean() > 0.5
    assert np.square(there - y).sum() < 0.95 * np.square(unstretched - y).sum()
    assert (np.square(there - y).sum(1) <= np.square(unstretched - y).sum(1) * 1.0001).all()


@pytest.mark.parametrize(("bits", "step"), [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.0), (8, 0.0), (8, 0.35)])
def test_levels_that_a_device_fits_side_by_side_are_those_of_each_vector_on_the_host(
    bits: int, step: float
) -> None:
    many = np.stack([rows(kind) for kind in ("gaussian", "laplace", "student")])
    found = plans(torch.from_numpy(many), bits, step)

    assert bool(found.settled.all())
    for few, at, by_largest in zip(many, found.at, found.by_largest, strict=True):
        alone = plan(few, bits, step)
        assert bool(by_largest) == alone.by_largest
        assert at.numpy() == pytest.approx(alone.levels.at, rel=1e-4, abs=1e-6)
