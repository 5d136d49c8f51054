"""Packets: the bytes of the specification, and nothing else gets in."""

import base64
import json
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import Cocktail, PacketError, decode
from compress.coding import zstd
from compress.packet import BODY, HEAD, LEVELS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text(encoding="utf-8"))
M = 900


def some(bits: int = 4, keep: float = 0.2) -> bytes:
    v = torch.randn(M, generator=torch.Generator().manual_seed(bits))
    return Cocktail(topk_ratio=keep, quant_bits=bits, quant_bucket_size=16).encode(v).packet


def sealed(packet: bytes | bytearray) -> bytes:
    """With a checksum that is right again: the fuzz must get past it."""
    return bytes(packet[:4]) + struct.pack("<I", zlib.crc32(packet[8:])) + bytes(packet[8:])


def is_sound(packet: bytes, m: int = M) -> bool:
    """Decodes to a sound update, or is refused: nothing in between, no other exception."""
    try:
        update = decode(packet, m)
    except PacketError:
        return False
    at = update.positions
    assert len(at) == len(update.values) <= m
    assert bool((at[1:] > at[:-1]).all())
    assert not len(at) or (int(at[0]) >= 0 and int(at[-1]) < m)
    assert bool(update.values.isfinite().all())
    return True


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g["name"].replace(" ", "-"))
def test_golden_packets_decode_to_the_same_bits_for_ever(golden: dict[str, object]) -> None:
    update = decode(base64.b64decode(golden["packet"]), golden["m"])

    assert update.positions.tolist() == golden["positions"]
    assert update.values.numpy().view(np.uint32).tolist() == golden["values"]


def test_the_golden_packets_cover_every_width_kind_and_codec() -> None:
    packets = [base64.b64decode(g["packet"]) for g in GOLDEN]
    entries = [struct.unpack_from("<5Q", p, HEAD.size + BODY.size) for p in packets]

    assert {p[3] for p in packets} == {1, 2, 3, 4, 8, 16, 32}
    assert {BODY.unpack_from(p, 8)[4] for p in packets} == {0, 1, 2, 3, 4}
    assert {e >> 61 for row in entries for e in row} == {0, 1, 2}


def test_a_packet_written_by_hand_from_the_specification_is_read() -> None:
    """Two values, +1.5 and -3, at 2 and 5 of 8, with 2 bits: levels 1 and 2, scale 1.5."""
    body = struct.pack("<QQQIBBH", 8, 2, 1, 128, 2, 0, 0)  # m, k, bytes of the mask, bucket, kind mask, shift
    body += struct.pack("<5Q", 1, 0, 1, 1, 1)  # five stored sections and their lengths
    body += struct.pack("<2H", 1, 2)  # levels
    body += bytes([0b00100100])  # mask: 2 and 5
    body += bytes([0b11_00])  # codes: 0 = +first level, 3 = -second level
    body += bytes([0xC0, 0x3F])  # BF16 1.5 = 0x3FC0, low byte and high byte
    packet = b"CK" + bytes([1, 2]) + struct.pack("<I", zlib.crc32(body)) + body

    update = decode(packet, 8)

    assert update.positions.tolist() == [2, 5]
    assert update.values.tolist() == [1.5, -3.0]
    assert update.dense().tolist() == [0, 0, 1.5, 0, 0, -3, 0, 0]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16, 32])
def test_a_packet_cut_anywhere_or_with_more_behind_it_is_refused(bits: int) -> None:
    packet = some(bits)

    for end in range(0, len(packet), 7):
        with pytest.raises(PacketError):
            decode(packet[:end], M)
        with pytest.raises(PacketError):
            decode(sealed(packet[:end]) if end > 8 else packet[:end], M)
    with pytest.raises(PacketError):
        decode(sealed(packet + b"\0"), M)


def test_any_flipped_bit_is_noticed() -> None:
    packet = some()
    rng = np.random.default_rng(0)

    for at in rng.integers(0, len(packet) * 8, 400):
        damaged = bytearray(packet)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(PacketError):
            decode(bytes(damaged), M)


@pytest.mark.slow
def test_ten_thousand_forged_packets_are_refused_or_harmless() -> None:
    """Bytes overwritten at random under a right checksum, headers favoured. Some decode; none does harm."""
    rng = np.random.default_rng(1)
    packets = [some(bits, keep) for bits in (1, 2, 3, 4, 8, 16, 32) for keep in (0.02, 0.2, 1.0)]
    packets += [base64.b64decode(g["packet"]) for g in GOLDEN if g["m"] == M]
    sound = 0
    for i in range(10_000):
        forged = bytearray(packets[i % len(packets)])
        reach = len(forged) if i % 2 else min(LEVELS + 20, len(forged))
        for at in rng.integers(2, reach, rng.integers(1, 4)):
            forged[at] = rng.integers(0, 256) if i % 3 else forged[at] ^ (1 << rng.integers(0, 8))
        sound += is_sound(sealed(forged))

    assert 500 < sound < 9500


@settings(max_examples=120)
@given(
    tail=st.binary(max_size=200),
    bits=st.sampled_from([1, 2, 3, 4, 8, 16, 32, 0, 7]),
    head=st.binary(min_size=32, max_size=32),
)
def test_random_bytes_behind_a_right_beginning_are_refused_or_harmless(
    tail: bytes, bits: int, head: bytes
) -> None:
    packet = sealed(b"CK" + bytes([1, bits]) + bytes(4) + head + tail)

    is_sound(packet)
    is_sound(packet, struct.unpack_from("<Q", head)[0] % 5000)


@settings(max_examples=120)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PacketError):
        decode(data, M)


def forged(**changes: int) -> bytes:
    """A sound packet with fields of its body replaced."""
    packet = bytearray(some())
    names = ["m", "k", "main", "bucket", "kind", "shift", "zero"]
    fields = dict(zip(names, BODY.unpack_from(packet, HEAD.size), strict=True)) | changes
    BODY.pack_into(packet, HEAD.size, *fields.values())
    return sealed(packet)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"m": M + 1}, "expected a sampled vector of 900"),
        ({"k": M + 1}, "expected a sampled vector of 900"),
        ({"k": 2**63}, "expected a sampled vector of 900"),
        ({"bucket": 0}, "buckets of 0"),
        ({"kind": 9}, "position kind 9"),
        ({"shift": 60}, "60 low bits"),
        ({"main": 2**60}, "positions in"),
        ({"zero": 1}, "reserved field 1"),
        ({"k": 181}, "."),
    ],
)
def test_a_header_that_lies_is_refused_with_what_was_met(changes: dict[str, int], complaint: str) -> None:
    with pytest.raises(PacketError, match=complaint):
        decode(forged(**changes), M)


@pytest.mark.parametrize("head", [b"PK", b"\0\0"])
def test_bytes_that_are_no_packet_are_named(head: bytes) -> None:
    with pytest.raises(PacketError, match="begins with"):
        decode(head + some()[2:], M)


def test_a_later_version_is_named() -> None:
    with pytest.raises(PacketError, match="version 2, expected b'CK' version 1"):
        decode(b"CK\x02" + some()[3:], M)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0x8000, 0x0001, 0x007F, 0xBF80, 0x7F7F])
def test_a_scale_that_devices_might_read_differently_is_refused(pattern: int) -> None:
    """Infinite, NaN, negative, denormal, or so large that a level times it overflows."""
    body = struct.pack("<QQQIBBH", 1, 1, 0, 128, 0, 0, 0) + struct.pack("<5Q", 0, 0, 1, 1, 1)
    body += struct.pack("<H", 65535) + bytes([0]) + struct.pack("<H", pattern)
    packet = b"CK" + bytes([1, 1]) + struct.pack("<I", zlib.crc32(body)) + body

    with pytest.raises(PacketError, match=r"scale|overflows"):
        decode(packet, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused(value: float) -> None:
    packet = bytearray(Cocktail(topk_ratio=1, quant_bits=32).encode(torch.ones(3)).packet)
    packet[-12:] = np.ascontiguousarray(np.full(3, value, "<f4").view(np.uint8).reshape(3, 4).T).tobytes()

    with pytest.raises(PacketError, match="not finite"):
        decode(sealed(packet), 3)


def test_a_bomb_takes_no_more_memory_than_the_vector_allows() -> None:
    """A packet of 30 kB that claims a mask of 200 MB for a vector of 900 elements."""
    bomb = zstd.compress(bytes(200_000_000))
    body = struct.pack("<QQQIBBH", M, 5, -(-M // 8), 128, 2, 0, 0)
    body += (
        struct.pack("<5Q", 1 << 61 | len(bomb), 0, 3, 1, 1)
        + struct.pack("<8H", *range(1, 9))
        + bomb
        + bytes(5)
    )
    packet = b"CK" + bytes([1, 4]) + struct.pack("<I", zlib.crc32(body)) + body

    tracemalloc.start()
    with pytest.raises(PacketError, match="claims"):
        decode(packet, M)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 200_000


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: type) -> None:
    assert torch.equal(decode(kind(some()), M).values, decode(some(), M).values)


def test_an_update_owns_its_memory() -> None:
    """A decoded update can be written to, and outlives the packet."""
    for bits in (1, 4, 16, 32):
        update = decode(some(bits), M)
        update.values.mul_(2)
        assert update.values.is_contiguous()


def test_an_lz4_section_longer_than_lz4_knows_is_refused_before_it_is_expanded() -> None:
    m = 1 << 31
    body = BODY.pack(m, m, 0, 128, 0, 0, 0) + struct.pack("<5Q", 0, 0, 2 << 61 | 1, 0, 0) + b"\0"
    packet = sealed(b"CK" + bytes([1, 32]) + bytes(4) + body)

    with pytest.raises(PacketError, match="an lz4 section of 8,589,934,592 bytes"):
        decode(packet, m)
