"""The order of a run: a function of the position, and of nothing else."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data import Corpus, Sample
from recipes.data.corpus import BLOCK, Mixture

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5).map(tuple)


@given(WEIGHTS, st.integers(0, 2**32 - 1), st.integers(0, 10**9))
def test_a_position_draws_the_same_whatever_was_asked_before(weights, seed, position) -> None:
    mixture = Mixture(weights, seed)

    assert mixture.draw(position) == Mixture(weights, seed).draw(position)


@given(WEIGHTS, st.integers(0, 2**32 - 1), st.integers(0, 20))
def test_each_data_set_is_drawn_from_in_its_own_order_without_a_gap(weights, seed, block) -> None:
    mixture = Mixture(weights, seed)
    first = mixture.before(block * BLOCK)

    draws = [mixture.draw(position) for position in range(block * BLOCK, (block + 1) * BLOCK)]

    for part, start in enumerate(first):
        places = [place for drawn, place in draws if drawn == part]
        assert places == list(range(start, start + len(places)))


@given(WEIGHTS, st.integers(1, 10**9))
def test_of_the_first_positions_each_data_set_has_its_share(weights, count) -> None:
    shares = np.array(Mixture(weights, 0).before(count)) / count

    assert np.abs(shares - np.array(weights) / sum(weights)).max() <= len(weights) / count + 1e-12


def test_data_sets_are_mixed_within_a_block_and_not_dealt_in_turn() -> None:
    parts = [Mixture((1.0, 1.0), 7).draw(position)[0] for position in range(BLOCK)]
    other = [Mixture((1.0, 1.0), 8).draw(position)[0] for position in range(BLOCK)]

    runs = 1 + sum(a != b for a, b in pairwise(parts))
    assert 0.4 * BLOCK < runs < 0.6 * BLOCK
    assert parts != other


def corpus(sizes: tuple[int, ...], weights: tuple[float, ...], total: int) -> Corpus:
    row = Sample(np.array([1, 2], dtype=np.int32), np.array([False, True]))
    return Corpus((row,) * sum(sizes), (), total, 5, True, Mixture(weights, 5), sizes)


def test_each_row_comes_once_in_each_epoch_of_its_own_data_set() -> None:
    small, large = 40, 1000
    run = corpus((small, large), (1.0, 3.0), 1000)

    rows = [run.sample_id(position) for position in range(1000)]

    ours, theirs = [r for r in rows if r < small], [r for r in rows if r >= small]
    assert (len(ours), len(theirs)) == (pytest.approx(250, abs=25), pytest.approx(750, abs=25))
    assert max(Counter(theirs).values()) == 1
    for epoch in range(len(ours) // small):
        assert sorted(ours[epoch * small : (epoch + 1) * small]) == list(range(small))
    assert ours[:small] != ours[small : 2 * small]
