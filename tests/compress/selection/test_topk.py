"""Top-K: the right ones, the right number of them, whatever the vector looks like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compress import NonFiniteError
from compress.topk import SAMPLED, TINY, everything, largest

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def plain(v: np.ndarray, k: int) -> list[int]:
    """The slow reference: sort by magnitude, ties by position; nothing below 2**-100."""
    order = sorted(range(len(v)), key=lambda i: (-abs(float(v[i])), i))
    return sorted(i for i in order[:k] if abs(float(v[i])) >= 2.0**-100)


@settings(max_examples=80)
@given(v=hnp.arrays(np.float32, st.integers(0, 60), elements=finite), share=st.floats(0, 1))
def test_topk_is_what_sorting_gives(v: np.ndarray, share: float) -> None:
    k = max(round(share * len(v)), 1)

    kept = largest(v, k)

    assert kept.positions.tolist() == plain(v, k)
    assert kept.values.tolist() == v[kept.positions].tolist()


def long(kind: str) -> np.ndarray:
    """1.3 M elements: long enough for the threshold to come from a sample."""
    rng = np.random.default_rng(0)
    m = 1_300_000
    assert m > SAMPLED
    made = {
        "student": lambda: rng.standard_t(4, m),
        "ordered": lambda: np.linspace(-1, 3, m),
        "few values": lambda: rng.integers(-3, 4, m).astype(float),
        "all equal": lambda: np.full(m, -2.5),
        "one spike": lambda: np.eye(1, m, 77)[0],
        "in one corner": lambda: np.where(np.arange(m) < m // 50, rng.standard_normal(m), 0),
        "in step": lambda: np.where(np.arange(m) % 256 < 3, rng.standard_normal(m), 0),
        "huge": lambda: rng.standard_normal(m) * 1e37,
        "denormal": lambda: rng.standard_normal(m) * 1e-42,
    }
    return made[kind]().astype(np.float32)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.25])
@pytest.mark.parametrize(
    "kind",
    [
        "student",
        "ordered",
        "few values",
        "all equal",
        "one spike",
        "in one corner",
        "in step",
        "huge",
        "denormal",
    ],
)
@pytest.mark.slow
def test_on_long_vectors_k_is_met_and_no_smaller_value_is_preferred(kind: str, share: float) -> None:
    v = long(kind)
    k = round(share * len(v))
    able = int((np.abs(v) >= 2.0**-100).sum())

    kept = largest(v, k)

    assert min(k, able) <= len(kept.positions) <= 1.01 * k
    assert (np.diff(kept.positions) > 0).all()
    assert (kept.values == v[kept.positions]).all()
    if len(kept.positions):
        left = np.delete(np.abs(v), kept.positions)
        assert left.max(initial=0) <= np.abs(kept.values).min()


def test_ties_at_the_border_go_to_the_first() -> None:
    v = np.float32([1, -1, 2, 1, -1, 1])

    assert largest(v, 3).positions.tolist() == [0, 1, 2]


def test_magnitudes_below_the_limit_are_not_sent() -> None:
    assert np.int32(TINY).view(np.float32) == 2.0**-100
    assert len(largest(np.full(10, 1e-38, np.float32), 5).positions) == 0
    assert len(largest(np.zeros(10, np.float32), 5).positions) == 0
    assert largest(np.float32([0, 1e-40, 3, -0.0]), 4).positions.tolist() == [2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("choose", [lambda v: largest(v, 2), everything])
def test_no_nonfinite_number_hides(bad: float, choose: object) -> None:
    v = np.ones(1000, np.float32)
    v[613] = bad

    with pytest.raises(NonFiniteError) as caught:
        choose(v)

    assert caught.value.position == 613
    assert "613" in str(caught.value)


def test_everything_keeps_zeros_and_denormals() -> None:
    v = np.float32([0, -0.0, 1e-45, 2])

    kept = everything(v)

    assert kept.positions.tolist() == [0, 1, 2, 3]
    assert kept.values.tobytes() == v.tobytes()
