"""Sections: the smaller form is chosen, the way back gives the bytes, and a lie allocates nothing."""

from __future__ import annotations

import tracemalloc

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import PacketError
from compress.coding.entropy_coding import LZ4, STORED, ZSTD, Section, expand, shrink

RNG = np.random.default_rng(0)


@settings(max_examples=100)
@given(raw=st.binary(max_size=2000), times=st.integers(1, 50))
def test_expanding_undoes_shrinking(raw: bytes, times: int) -> None:
    section = shrink(raw * times)

    assert bytes(expand(section)) == raw * times
    assert len(section.data) <= len(raw) * times


def test_noise_is_stored_statistics_go_to_zstd_and_repeats_to_lz4() -> None:
    noise = RNG.integers(0, 256, 100_000, np.uint8).tobytes()
    skewed = RNG.geometric(0.2, 100_000).clip(0, 255).astype(np.uint8).tobytes()
    untouched = bytes(90_000) + noise[:200]

    assert shrink(noise).codec == STORED
    assert shrink(skewed).codec == ZSTD
    assert shrink(untouched).codec == LZ4


def test_bytes_that_repeat_only_in_the_middle_are_not_taken_for_untouched() -> None:
    noise = RNG.integers(0, 256, 200_000, np.uint8).tobytes()

    section = shrink(noise + bytes(70_000) + noise[::-1])

    assert section.codec in (ZSTD, LZ4)
    assert len(section.data) < 0.98 * section.raw


@pytest.mark.parametrize(
    "section",
    [
        Section(ZSTD, 10, zstandard.compress(b"x" * 11)),
        Section(ZSTD, 10, b"no frame at all"),
        Section(ZSTD, 10, zstandard.compress(b"x" * 10)[:-3]),
        Section(ZSTD, 10, zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 10)),
        Section(LZ4, 10, lz4.block.compress(b"x" * 11, store_size=False)),
        Section(LZ4, 10, lz4.block.compress(b"x" * 9, store_size=False)),
        Section(LZ4, 10, b"\xff\xff\xff"),
        Section(STORED, 10, b"123456789"),
        Section(3, 10, b"1234567890"),
        Section(7, 0, b""),
    ],
    ids=lambda s: f"{s.codec}-{len(s.data)}",
)
def test_a_section_that_lies_is_refused(section: Section) -> None:
    with pytest.raises(PacketError):
        expand(section)


def test_a_bomb_is_refused_before_memory_is_asked_for() -> None:
    bomb = zstandard.compress(bytes(200_000_000))

    tracemalloc.start()
    with pytest.raises(PacketError, match="claims 200000000 bytes"):
        expand(Section(ZSTD, 1000, bomb))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 100_000
