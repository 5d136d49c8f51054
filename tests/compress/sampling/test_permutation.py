"""The order of the units: a bijection that any platform computes alike."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.sampling import keys, permute, place_of


@settings(max_examples=40)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), cycle=st.integers(0, 2**40))
def test_every_number_appears_exactly_once(n: int, seed: int, cycle: int) -> None:
    there = permute(np.arange(n, dtype=np.int64), n, keys(seed, cycle))

    assert sorted(there.tolist()) == list(range(n))


def test_torch_and_numpy_give_the_same_order() -> None:
    key = keys(7, 3)

    assert (
        permute(torch.arange(10_007), 10_007, key).tolist()
        == permute(np.arange(10_007, dtype=np.int64), 10_007, key).tolist()
    )


def test_the_order_is_the_one_written_in_the_specification() -> None:
    """Golden: another implementation, or another version of this one, must give these numbers."""
    assert permute(np.arange(10, dtype=np.int64), 10, keys(1, 0)).tolist() == [6, 0, 3, 1, 4, 8, 2, 7, 5, 9]
    assert permute(np.array([0, 1, 10**9, 2 * 10**10 - 1], np.int64), 2 * 10**10, keys(2026, 5)).tolist() == [
        15562448915,
        3481500482,
        8128872412,
        17657094053,
    ]


def test_twenty_billion_places_need_no_table() -> None:
    some = permute(np.arange(1000, dtype=np.int64) * 19_999_999, 20_000_000_000, keys(1))

    assert len(set(some.tolist())) == 1000
    assert some.min() >= 0
    assert some.max() < 20_000_000_000


def test_the_place_of_a_unit_is_uniform_over_seeds() -> None:
    """Chi-square over 64 cells of 3,200 first places: 63 degrees of freedom, 120 is beyond one in 10,000."""
    firsts = np.array([int(permute(np.zeros(1, np.int64), 64, keys(seed))[0]) for seed in range(3200)])
    counts = np.bincount(firsts, minlength=64)

    assert ((counts - 50) ** 2 / 50).sum() < 120


def test_neighbours_do_not_stay_neighbours() -> None:
    there = permute(np.arange(100_000, dtype=np.int64), 100_000, keys(5))

    assert (np.abs(np.diff(there)) <= 10).mean() < 0.001  # 0.0002 by chance


@settings(max_examples=40)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_place_of_inverts_permute(n: int, seed: int) -> None:
    spots = np.arange(n, dtype=np.int64)

    assert (place_of(permute(spots, n, keys(seed)), n, keys(seed)) == spots).all()
