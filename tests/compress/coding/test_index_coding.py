"""Positions: each way to say them comes back, the smallest is chosen, and nonsense is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import PacketError
from compress import coding as places
from compress.coding import (
    ALL,
    ELIAS_FANO,
    GAPS,
    MASK,
    PLAIN,
    STORED,
    EncodedPositions,
    Section,
    decode_positions,
    encode_positions,
    section_sizes,
)

WAYS = {
    GAPS: places._gaps,
    MASK: places._mask,
    ELIAS_FANO: places._elias_fano,
    PLAIN: places._plain,
}


def back(stored: EncodedPositions, m: int, k: int) -> list[int]:
    allowed, need = section_sizes(stored.kind, stored.shift, m, k)
    assert stored.main.raw in allowed
    assert stored.low.raw == need
    windows = [list(decode_positions(stored, m, k, window)) for window in (8, 1 << 16)]
    small, whole = (np.concatenate([np.empty(0, np.int64), *parts]).tolist() for parts in windows)
    assert small == whole
    return whole


def chosen(m: int, k: int, seed: int = 0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(m, k, replace=False))


def entropy(d: float) -> float:
    return -d * math.log2(d) - (1 - d) * math.log2(1 - d)


@pytest.mark.parametrize("kind", WAYS)
@settings(max_examples=40)
@given(data=st.data())
def test_every_coding_is_decoded_to_its_positions(kind: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, 3000))
    positions = sorted(data.draw(st.sets(st.integers(0, m - 1), min_size=1, max_size=200)))

    stored = WAYS[kind](np.array(positions), m)

    assert stored.kind == kind
    assert back(stored, m, len(positions)) == positions


@settings(max_examples=40)
@given(data=st.data())
def test_the_chosen_coding_is_decoded_to_its_positions(data: st.DataObject) -> None:
    m = data.draw(st.integers(0, 3000))
    positions = sorted(data.draw(st.sets(st.integers(0, max(m - 1, 0)), max_size=min(m, 300))))

    assert back(encode_positions(np.array(positions, np.int64), m), m, len(positions)) == positions


@pytest.mark.parametrize("gap", [1, 2, 254, 255, 256, 257, 509, 510, 511, 70_000])
def test_gaps_around_the_escape_are_decoded(gap: int) -> None:
    positions = np.cumsum([0, gap, 1, gap, gap]).astype(np.int64)
    m = int(positions[-1]) + 1

    assert back(places._gaps(positions, m), m, 5) == positions.tolist()


@pytest.mark.parametrize("kind", [ELIAS_FANO, PLAIN, GAPS])
def test_positions_beyond_four_billion_are_decoded(kind: int) -> None:
    positions = np.array([0, 2**32, 2**39 + 5])

    assert back(WAYS[kind](positions, 2**39 + 6), 2**39 + 6, 3) == positions.tolist()


@pytest.mark.parametrize("d", [0.005, 0.01, 0.05, 0.08, 0.2, 0.25, 0.5])
def test_random_positions_take_at_most_two_percent_over_their_entropy(d: float) -> None:
    m = 1_000_000
    size = encode_positions(chosen(m, round(d * m)), m).size() * 8 / m

    assert size < 1.02 * entropy(d)


def test_all_positions_take_nothing() -> None:
    stored = encode_positions(np.arange(1000), 1000)

    assert stored.kind == ALL
    assert stored.size() == 0
    assert back(stored, 1000, 1000) == list(range(1000))


def test_a_few_positions_need_no_coder() -> None:
    assert encode_positions(np.array([5]), 10**6).size() <= 4
    assert encode_positions(chosen(10_000, 20), 10_000).size() <= 30
    assert encode_positions(chosen(100_000, 50), 100_000).kind == ELIAS_FANO


def test_crowded_positions_are_coded_far_below_the_entropy_of_their_density() -> None:
    m = 1_000_000
    positions = np.flatnonzero(
        (np.arange(m) // 10_000 % 10 == 0) & (np.random.default_rng(0).random(m) < 0.5)
    )

    assert encode_positions(positions, m).size() * 8 / m < 0.5 * entropy(0.05)


def stored(numbers: list[int]) -> Section:
    return Section(STORED, len(numbers), bytes(numbers))


@pytest.mark.parametrize(
    ("kind", "shift", "main", "low", "m", "k"),
    [
        (GAPS, 0, [1, 1], [], 10, 3),               # too few
        (GAPS, 0, [255, 255, 1], [], 10, 1),        # leads out
        (GAPS, 0, [5, 5], [], 10, 2),               # the second is outside
        (GAPS, 40, [200], [0] * 5, 10, 1),          # leads far out
        (GAPS, 0, [1, 255], [], 600, 1),            # ends in an escape: one gap, never closed
        (MASK, 0, [0b111], [], 8, 2),               # too many
        (MASK, 0, [0, 0b10], [], 9, 1),             # beyond the end
        (ELIAS_FANO, 0, [0b1], [], 3, 2),           # too few
        (ELIAS_FANO, 2, [0b11], [0b0001], 16, 2),   # descends
        (PLAIN, 0, [1, 0, 0, 0, 1, 0, 0, 0], [], 9, 2),         # twice the same
        (PLAIN, 0, [9, 0, 0, 0], [], 9, 1),                     # outside
        (PLAIN, 0, [255] * 8, [], 2**33, 1),                    # beyond 63 bits
    ],
)  # fmt: skip
def test_impossible_positions_are_refused(
    kind: int, shift: int, main: list[int], low: list[int], m: int, k: int
) -> None:
    with pytest.raises(PacketError):
        list(decode_positions(EncodedPositions(kind, shift, stored(main), stored(low)), m, k, 8))


@pytest.mark.parametrize(
    ("kind", "shift", "m", "k"), [(5, 0, 10, 1), (ALL, 0, 10, 9), (GAPS, 4, 10, 1), (ELIAS_FANO, 63, 10, 1)]
)
def test_an_impossible_header_is_refused(kind: int, shift: int, m: int, k: int) -> None:
    with pytest.raises(PacketError):
        section_sizes(kind, shift, m, k)
