"""A packet in pieces is the packet as a whole: the same bits, the same refusals, in bounded memory."""

import base64
import json
import tracemalloc
from pathlib import Path

import lz4.block
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_format import forged, sealed
from test_format import some as small_packet

from compress import Cocktail, PacketError, Update, coding, decode, decode_windows
from compress.coding import (
    LZ4,
    STORED,
    ZSTD,
    FileSlice,
    Section,
    Stream,
    encode_positions,
    expand,
    shrink,
    zstd,
)
from compress.packet import write
from compress.quantization import quantize, table_size

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text(encoding="utf-8"))
BITS = [1, 2, 3, 4, 8, 16, 32]


def joined(packet: bytes, m: int, at_most: int = 1 << 16) -> Update:
    parts = list(decode_windows(memoryview(packet), m, at_most))
    assert all(0 < len(part.positions) == len(part.values) <= max(at_most, 8) for part in parts)
    where = [part.positions for part in parts] or [torch.empty(0, dtype=torch.int64)]
    return Update(m, torch.cat(where), torch.cat([part.values for part in parts] or [torch.empty(0)]))


def assert_same(a: Update, b: Update) -> None:
    assert torch.equal(a.positions, b.positions)
    assert torch.equal(a.values.view(torch.int32), b.values.view(torch.int32))


@settings(max_examples=50)
@given(data=st.data())
def test_windows_put_together_are_the_update_bit_for_bit(data: st.DataObject) -> None:
    """Any width, bucket, kind of positions and size of a piece; values that repeat and values that do not."""
    m = data.draw(st.integers(1, 3000))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    k = data.draw(st.integers(0, m))
    where = np.sort(rng.choice(m, k, replace=False)).astype(np.int64)
    if data.draw(st.booleans()) and k:
        where = np.arange(m - k, m, dtype=np.int64)  # long runs: sections that lz4 takes
    values = rng.standard_t(3, k).astype(np.float32)
    if data.draw(st.booleans()):
        values[:] = 1.5
    ways = [
        coding._elias_fano,
        coding._mask,
        coding._plain,
        *([coding._gaps] if k else []),
    ]
    places = data.draw(st.sampled_from([encode_positions, *ways])) if k else encode_positions
    bucket = data.draw(st.sampled_from([1, 7, 16, 128, 5000]))
    packet = write(m, places(where, m), quantize(values, data.draw(st.sampled_from(BITS)), bucket))

    assert_same(joined(packet, m, data.draw(st.sampled_from([1, 8, 17, 100, 1 << 16]))), decode(packet, m))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g["name"].replace(" ", "-"))
def test_golden_packets_in_windows_are_the_same_for_ever(golden: dict[str, object]) -> None:
    packet = base64.b64decode(golden["packet"])

    for at_most in (8, 1000):
        assert_same(joined(packet, golden["m"], at_most), decode(packet, golden["m"]))


@settings(max_examples=60)
@given(data=st.data())
def test_windows_refuse_what_decode_refuses_and_agree_on_the_rest(data: st.DataObject) -> None:
    """Bytes overwritten at random under a right checksum."""
    golden = data.draw(st.sampled_from(GOLDEN))
    packet, m = bytearray(base64.b64decode(golden["packet"])), golden["m"]
    for _ in range(data.draw(st.integers(1, 3))):
        packet[data.draw(st.integers(2, len(packet) - 1))] = data.draw(st.integers(0, 255))
    packet = sealed(packet)
    try:
        whole = decode(packet, m)
    except PacketError:
        whole = None

    try:
        parts = joined(packet, m, 16)
    except PacketError:
        assert whole is None
    else:
        assert whole is not None
        assert_same(parts, whole)


def entries(packet: bytes) -> list[int]:
    return [int.from_bytes(packet[at : at + 8], "little") for at in range(40, 80, 8)]


@pytest.mark.parametrize("changes", [{"k": 181}, {"m": 901}, {"kind": 9}, {"zero": 1}])
def test_a_header_that_lies_is_refused_before_the_first_window(changes: dict[str, int]) -> None:
    with pytest.raises(PacketError):
        list(decode_windows(memoryview(forged(**changes)), 900))


@settings(max_examples=60)
@given(data=st.data())
def test_a_stream_of_any_codec_gives_the_bytes_of_its_section(data: st.DataObject) -> None:
    """Long and short repeats, matches that overlap themselves, reads and skips of any size."""
    words = data.draw(
        st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.integers(1, 30_000)), max_size=6)
    )
    raw = b"".join(word * times for word, times in words)
    codec = data.draw(st.sampled_from([STORED, ZSTD, LZ4]))
    packed = {STORED: bytes, ZSTD: zstd.compress}.get(
        codec, lambda r: lz4.block.compress(r, store_size=False)
    )
    section = Section(codec, len(raw), memoryview(packed(raw)))
    skip = data.draw(st.integers(0, len(raw)))
    stream, got = Stream(section, skip), bytearray()

    while stream.left:
        got += stream.read(data.draw(st.integers(1, 100_000))).tobytes()
    stream.end()

    assert got == raw[skip:]
    assert bytes(expand(section)) == raw


def test_a_zstd_section_that_shrank_to_nothing_takes_no_memory_while_it_is_read() -> None:
    raw = bytes(10_000_000)
    stream = Stream(Section(ZSTD, len(raw), memoryview(zstd.compress(raw))))
    del raw

    tracemalloc.start()
    while stream.left:
        assert not stream.read(50_000).any()
    stream.end()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 2_000_000


def test_a_packet_stays_in_its_file_until_its_bytes_are_asked_for(tmp_path: Path) -> None:
    packet = small_packet()
    (tmp_path / "log").write_bytes(b"before" + packet + b"behind")
    with (tmp_path / "log").open("rb", buffering=0) as file:
        stored = FileSlice(file, 6, len(packet))

        assert_same(next(decode_windows(stored, 900)), decode(packet, 900))
        assert bytes(stored[2:5]) == packet[2:5]
        with pytest.raises(PacketError, match="the file ends"):
            bytes(FileSlice(file, 6, len(packet) + 100))


def test_a_large_packet_in_windows_takes_a_fraction_of_its_memory() -> None:
    v = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    packet = Cocktail(topk_ratio=0.2, quant_bits=4).encode(v).packet
    whole = decode(packet, len(v))
    del v

    tracemalloc.start()
    count = sum(len(part.positions) for part in decode_windows(memoryview(packet), whole.size, 1 << 14))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert count == len(whole.positions)
    assert peak < 2_500_000


def test_sections_of_a_packet_are_of_all_codecs_in_these_tests() -> None:
    assert shrink(bytes(100_000)).codec == LZ4
    assert {e >> 61 for g in GOLDEN for e in entries(base64.b64decode(g["packet"]))} == {0, 1, 2}


def test_more_positions_than_low_bits_are_refused() -> None:
    golden = next(g for g in GOLDEN if base64.b64decode(g["packet"])[36] == 3)
    packet, m = bytearray(base64.b64decode(golden["packet"])), golden["m"]
    at = next(i for i in range(40 + 40 + table_size(packet[3]) * 2, len(packet)) if packet[i] != 0xFF)
    packet[at] = 0xFF  # every place of the upper bits taken

    for read in (lambda p: decode(p, m), lambda p: list(decode_windows(memoryview(p), m, 8))):
        with pytest.raises(PacketError):
            read(sealed(packet))
