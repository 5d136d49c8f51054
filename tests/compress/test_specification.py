"""compress/FORMAT.md, packet and sampling schedule, implemented again from its text alone: plain Python.

Where this file and the room disagree, the text is wrong or the room is.
"""

import base64
import json
import math
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import lz4.block
import numpy as np
import pytest
import torch

from compress import Cocktail, decode
from compress.coding import zstd

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


def up(a: int, b: int) -> int:
    return -(-a // b)


def packed(data: bytes, width: int, count: int) -> list[int]:
    number = int.from_bytes(data, "little")
    return [number >> (i * width) & ((1 << width) - 1) for i in range(count)]


def expanded(codec: int, data: bytes, size: int) -> bytes:
    if codec == 1:
        data = zstd.decompress(data)
    elif codec == 2:
        data = lz4.block.decompress(data, uncompressed_size=size)
    assert len(data) == size
    return data


def places(kind: int, s: int, main: bytes, low: bytes, m: int, k: int) -> list[int]:
    lows = packed(low, s, k) if s else [0] * k
    if kind == 0:
        return list(range(m))
    if kind == 1:
        found, at, skipped, j = [], -1, 0, 0
        for byte in main:
            skipped += byte
            if byte < 255:
                at += (skipped << s) + lows[j] + 1
                found.append(at)
                skipped, j = 0, j + 1
        return found
    if kind == 2:
        return [i for i in range(m) if main[i // 8] >> (i % 8) & 1]
    if kind == 3:
        upper = [i for i in range(len(main) * 8) if main[i // 8] >> (i % 8) & 1]
        return [((u - j) << s) + lows[j] for j, u in enumerate(upper)]
    return list(struct.unpack(f"<{k}{'I' if m <= 2**32 else 'Q'}", main))


def values(
    q: int, bucket: int, k: int, levels: list[float], codes: bytes, low: bytes, high: bytes
) -> list[float]:
    if q == 32:
        return [struct.unpack("<f", bytes(codes[i * k + j] for i in range(4)))[0] for j in range(k)]
    scales = [struct.unpack("<f", bytes([0, 0, a, b]))[0] for a, b in zip(low, high, strict=True)]
    if q == 3:
        signs, numbers = packed(codes, 1, k), packed(codes[up(k, 8) :], 2, k)
        signed = [-levels[n] if sign else levels[n] for sign, n in zip(signs, numbers, strict=True)]
    elif q == 16:
        whole = [codes[j] | codes[k + j] << 8 for j in range(k)]
        signed = [-float(c % 32768) if c >= 32768 else float(c) for c in whole]
    else:
        h = len(levels)
        signed = [-levels[c % h] if c >= h else levels[c] for c in packed(codes, q, k)]
    return [level * scales[j // bucket] for j, level in enumerate(signed)]


def plain_decode(p: bytes, m: int) -> tuple[list[int], list[float]]:
    assert p[:3] == b"CK\x01"
    q = p[3]
    assert struct.unpack_from("<I", p, 4)[0] == zlib.crc32(p[8:])
    m_, k, main, bucket, kind, s, zero = struct.unpack_from("<QQQIBBH", p, 8)
    assert m_ == m
    assert zero == 0
    h = 1 << (q - 1) if q <= 8 else 0
    levels = [float(level) for level in struct.unpack_from(f"<{h}H", p, 80)]
    buckets = up(k, bucket) if q < 32 else 0
    codes = up(k, 8) + up(k, 4) if q == 3 else up(k * q, 8)
    at, parts = 80 + 2 * h, []
    for entry, size in zip(
        struct.unpack_from("<5Q", p, 40), (main, up(k * s, 8), codes, buckets, buckets), strict=True
    ):
        length = entry % 2**61
        parts.append(expanded(entry >> 61, p[at : at + length], size))
        at += length
    assert at == len(p)
    return places(kind, s, parts[0], parts[1], m, k), values(q, bucket, k, levels, *parts[2:])


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g["name"].replace(" ", "-"))
def test_the_text_reads_every_golden_packet(golden: dict[str, object]) -> None:
    positions, found = plain_decode(base64.b64decode(golden["packet"]), golden["m"])

    assert positions == golden["positions"]
    assert np.array(found, np.float32).view(np.uint32).tolist() == golden["values"]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("keep", [0.01, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("m", [1, 77, 12_000])
def test_the_text_reads_what_the_encoder_writes(m: int, keep: float, bits: int) -> None:
    v = torch.randn(m, generator=torch.Generator().manual_seed(m))
    packet = Cocktail(topk_ratio=keep, quant_bits=bits).encode(v).packet
    update = decode(packet, m)

    positions, found = plain_decode(packet, m)

    assert positions == update.positions.tolist()
    assert np.array(found, np.float32).tobytes() == update.values.numpy().tobytes()


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def f(x: int, key: int) -> int:
    x ^= key
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def plain_draw(n: int, p: float, block: int, seed: int, round: int) -> list[int]:
    share = Fraction(p).limit_denominator(10**9)
    a, b = share.numerator, share.denominator
    while block > 1 and n * a < 16 * block * b:
        block //= 2
    count = up(n, block)
    cycle, phase = divmod(round, b)
    state = mix64(mix64(seed) ^ cycle)
    key = [mix64(state + i) % 2**32 for i in range(6)]
    rows = math.isqrt(count - 1) + 1 if count > 1 else 1
    columns = up(count, rows)
    units = []
    for place in range(phase * a * count // b, (phase + 1) * a * count // b):
        unit = place % count
        while True:
            left, right = divmod(unit, columns)
            for i in range(6):
                if i % 2 == 0:
                    left = (left + (f(right, key[i]) * rows >> 32)) % rows
                else:
                    right = (right + (f(left, key[i]) * columns >> 32)) % columns
            unit = left * columns + right
            if unit < count:
                break
        units.append(unit)
    return [i for unit in sorted(units) for i in range(unit * block, min((unit + 1) * block, n))]


@pytest.mark.parametrize("round", [0, 3, 12, 1_000_003])
@pytest.mark.parametrize("p", [0.1, 0.3, 1 / 3, 0.137, 1.0])
@pytest.mark.parametrize(("n", "block"), [(1, 256), (1000, 4), (5003, 1), (20_000, 256)])
def test_the_text_draws_the_same_sample(n: int, block: int, p: float, round: int) -> None:
    mix = Cocktail(random_ratio=p, sample_kind="element" if block == 1 else "block", block_size=block)
    s = mix.draw(n, 2026, round)

    assert s.coordinates(torch.arange(s.m)).tolist() == plain_draw(n, p, block, 2026, round)
