"""Sections: the smaller form is chosen, the way back gives the bytes, and a lie allocates nothing."""

import tracemalloc

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import PacketError
from compress.coding import LZ4, STORED, ZSTD, Section, Stream, ZstdFrame, expand, shrink, zstd

RNG = np.random.default_rng(0)
NO_SIZE = zstd.compress(b"x" * 10, options={zstd.CompressionParameter.content_size_flag: 0})


@settings(max_examples=50)
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


def read_through(section: Section) -> None:
    stream = Stream(section)
    stream.read(section.raw)
    stream.end()


@pytest.mark.parametrize(
    "section",
    [
        Section(ZSTD, 10, zstd.compress(b"x" * 11)),
        Section(ZSTD, 10, b"no frame at all"),
        Section(ZSTD, 10, b""),
        Section(ZSTD, 10, zstd.compress(b"x" * 10)[:-3]),
        Section(ZSTD, 10, zstd.compress(b"0123456789")[:-1]),
        Section(LZ4, 10, lz4.block.compress(b"x" * 11, store_size=False)),
        Section(LZ4, 10, lz4.block.compress(b"x" * 9, store_size=False)),
        Section(LZ4, 10, b"\xff\xff\xff"),
        Section(LZ4, 10, b""),
        Section(LZ4, 100, b"\x1fx\0\0\x50" + bytes(6)),
        Section(STORED, 10, b"123456789"),
        Section(STORED, 10, b"12345678901"),
        Section(3, 10, b"1234567890"),
        Section(7, 0, b""),
        Section(ZSTD, 10, NO_SIZE),
    ],
    ids=lambda s: f"{s.codec}-{len(s.data)}",
)
def test_a_section_that_lies_is_refused_whole_and_in_pieces(section: Section) -> None:
    with pytest.raises(PacketError):
        expand(section)
    with pytest.raises(PacketError):
        read_through(section)


def frame(
    window: bytes,
    raw: bytes,
    descriptor: int = 0x80,  # its size in four bytes
) -> Section:
    """A frame with one stored block. `window`: the byte of its window, or none."""
    block = (len(raw) << 3 | 1).to_bytes(3, "little") + raw
    data = b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + len(raw).to_bytes(4, "little") + block
    return Section(ZSTD, len(raw), data)


@pytest.mark.parametrize(
    ("section", "length", "window"),
    [
        (frame(bytes([9 << 3]), b"0123456789"), 10, 512 << 10),  # the window of our encoder
        (frame(bytes([12 << 3 | 3]), b"0123456789"), 10, (4 << 20) // 8 * 11),
        (frame(b"", b"0123456789", 0xA0), 9, 10),  # one segment: as many bytes as there are
    ],
)
def test_the_header_of_a_frame_says_its_length_and_window(section: Section, length: int, window: int) -> None:
    stream = Stream(section)

    assert ZstdFrame.of(section) == ZstdFrame(length, window)
    assert bytes(expand(section)) == stream.read(10).tobytes() == b"0123456789"


@settings(max_examples=50)
@given(size=st.integers(1, 300_000))
def test_the_header_of_a_frame_of_ours_is_read_to_its_end(size: int) -> None:
    section = Section(ZSTD, size, zstd.compress(bytes(size)))
    stream = Stream(section)

    assert stream.read(size).tobytes() == bytes(size)
    stream.end()


@pytest.mark.parametrize("window", [13 << 3 | 1, 14 << 3, 21 << 3 | 7])
def test_a_window_above_8_mib_is_refused(window: int) -> None:
    section = frame(bytes([window]), b"0123456789")
    for read in (expand, lambda it: Stream(it).read(10)):
        with pytest.raises(PacketError, match="needs a window of"):
            read(section)


def test_a_skippable_frame_is_no_section() -> None:
    section = Section(ZSTD, 0, b"\x50\x2a\x4d\x18" + bytes(4))
    for read in (expand, lambda it: Stream(it).end()):
        with pytest.raises(PacketError, match="claims"):
            read(section)


@pytest.mark.parametrize(
    ("codec", "bomb", "said"),
    [
        (ZSTD, zstd.compress(bytes(200_000_000)), "claims 200000000 bytes"),
        (LZ4, lz4.block.compress(bytes(200_000_000), store_size=False), "does not decompress"),
    ],
)
def test_a_bomb_is_refused_before_memory_is_asked_for(codec: int, bomb: bytes, said: str) -> None:
    tracemalloc.start()
    with pytest.raises(PacketError, match=said):
        expand(Section(codec, 1000, bomb))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 100_000
