"""Writes golden.json: packets that every later version, and every other implementation, must decode to the
same bits.

Run it only for a new packet version: python tests/compress/make_golden.py
"""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compress import Cocktail, coding, decode
from compress.packet import write
from compress.quantization import quantize

M = 700


def vector() -> np.ndarray:
    """(700,) float32 without any library's random numbers: a heavy-tailed walk over the remainders of a
    prime.
    """
    u = (np.arange(1, M + 1) * 7919 % 1009 + 0.5) / 1009
    return (np.sign(u - 0.5) * (np.abs(u - 0.5) * 2.2) ** 3 / (1.0001 - np.abs(2 * u - 1)) ** 0.4).astype(
        np.float32
    )


def entry(name: str, data: bytes, m: int) -> dict[str, object]:
    """One packet and what it says: positions, and values as FP32 patterns."""
    update = decode(data, m)
    return {
        "name": name,
        "m": m,
        "packet": base64.b64encode(data).decode(),
        "positions": update.positions.tolist(),
        "values": update.values.numpy().view(np.uint32).tolist(),
    }


def main() -> None:
    """Every width, every way to say positions, every codec."""
    v = vector()
    at = np.sort(np.argsort(-np.abs(v), kind="stable")[:60])
    made = []
    for bits in (1, 2, 3, 4, 8, 16, 32):
        mix = Cocktail(topk_ratio=0.1, quant_bits=bits, quant_bucket_size=16)
        made.append(entry(f"{bits} bits", mix.encode(torch.from_numpy(v)).packet, M))
    ways = {
        "gaps": coding._gaps,
        "mask": coding._mask,
        "Elias-Fano": coding._elias_fano,
        "plain": coding._plain,
    }
    for name, way in ways.items():
        made.append(entry(name, write(M, way(at, M), quantize(v[at], 4, 16)), M))
    for name, m, at in (
        ("gaps in two parts", 100_000, np.array([3, 300, 301, 9000, 99_999])),
        ("gaps with escapes", 1400, np.array([*range(38), 400, 1201])),
    ):
        few = quantize(v[: len(at)], 2, 128)
        made.append(entry(name, write(m, coding._gaps(at, m), few), m))
    same = np.repeat(np.float32([1.5, -0.25]), 2000)
    made.append(
        entry("repeats", Cocktail(topk_ratio=1, quant_bits=8).encode(torch.from_numpy(same)).packet, 4000)
    )
    made.append(entry("nothing", Cocktail().encode(torch.zeros(9)).packet, 9))
    made.append(entry("empty", Cocktail().encode(torch.zeros(0)).packet, 0))
    made.append(
        entry("identity", Cocktail(topk_ratio=1, quant_bits=32).encode(torch.from_numpy(v[:8])).packet, 8)
    )
    Path(__file__).with_name("golden.json").write_text(
        "[" + ",\n".join(map(json.dumps, made)) + "]\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
