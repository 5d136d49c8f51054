"""Bits side by side: what goes in comes out, in the order the specification says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.coding import lookup, pack, unpack


@settings(max_examples=50)
@given(width=st.integers(0, 40), data=st.data())
def test_unpacking_undoes_packing(width: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=40))
    dtype = np.uint8 if width in (1, 2, 4, 8) else np.int64

    packed = pack(np.array(numbers, dtype), width)

    assert len(packed) == -(-len(numbers) * width // 8)
    assert unpack(packed, width, len(numbers)).tolist() == numbers


@pytest.mark.parametrize(
    ("width", "numbers", "expected"),
    [
        (1, [1, 0, 0, 0, 0, 0, 0, 0, 1], [0x01, 0x01]),
        (2, [3, 0, 1, 2], [0b10_01_00_11]),
        (4, [0xA, 0x5, 0xF], [0x5A, 0x0F]),
        (3, [7, 0, 5], [0b01_000_111, 0b1]),
    ],
)
def test_the_first_number_is_in_the_lowest_bits(width: int, numbers: list[int], expected: list[int]) -> None:
    assert pack(np.array(numbers, np.uint8), width).tolist() == expected


def test_lookup_reads_its_table_once_a_byte() -> None:
    assert lookup(np.array([10.0, 20, 30, 40]), np.array([0b11_10_01_00], np.uint8), 2).tolist() == [
        10,
        20,
        30,
        40,
    ]
