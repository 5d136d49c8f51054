"""What a packet costs on this machine: bytes against the entropy, time against memory speed, error against
exact top-K.

Each row is measured beside its rivals in the same breath: the floor (reading the sampled values of x and x'
once) and the packet as DS3Lab/CocktailSGD makes it (every 10th element, torch.topk, bitmask, max-scaled
grid). One thread, and the best of several times: what else the machine does can only add.
"""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compress.packet import decode, read_header
from compress.sampling import Sample

from .bit_packing import unpack
from .codec import Cocktail
from .sparse_update import Update

SETTINGS = (
    Cocktail(0.1, 0.2, 4),      # the reference's defaults
    Cocktail(0.1, 0.08, 4),
    Cocktail(0.1, 0.05, 2),
)  # fmt: skip
GRID = tuple(Cocktail(0.1, keep, bits) for keep in (0.01, 0.05, 0.1, 0.2, 0.25) for bits in (1, 2, 4))
TIMES = 7  # each round another sample, so that the caches do not help
SEED = 2026


@dataclass(frozen=True)
class Pair:
    """A local model and the common one it left: x - common is what is sent."""

    name: str
    x: torch.Tensor  # (P,) float32
    common: torch.Tensor  # (P,) float32


def bench(
    params: int,
    device: str = "cpu",
    recorded: torch.Tensor | None = None,  # (P',) differences x - x' from a real run
    mixes: Sequence[Cocktail] = SETTINGS,
    times: int = TIMES,
) -> list[dict[str, Any]]:
    """One row for each kind of data and each mix; the keys are those of `cocktail bench compress --json`."""
    pairs = [student(params, device)]
    if recorded is not None:
        pairs.append(
            Pair("recorded", recorded.to(device, torch.float32), torch.zeros(len(recorded), device=device))
        )
    with one_thread():
        return [measure(pair, mix, times) for pair in pairs for mix in mixes]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as plain text, one line each under a line of names."""
    names = list(rows[0])
    lines = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def student(params: int, device: str = "cpu") -> Pair:
    """Heavy-tailed differences, Student-t with 4 degrees of freedom, of the size of a learning rate."""
    g = torch.Generator(device).manual_seed(SEED)
    delta = torch.randn(params, generator=g, device=device).mul_(1e-4)
    for start in range(
        0, params, 1 << 22
    ):  # t(4) = normal / sqrt(chi-square(4) / 4); in pieces, for the memory
        piece = delta[start : start + (1 << 22)]
        uniform = torch.rand(2, len(piece), generator=g, device=device)
        piece /= uniform.clamp_(min=1e-12).log_().sum(0).mul_(-0.5).sqrt_()
    common = torch.randn(params, generator=g, device=device).mul_(0.02)
    return Pair("student-t(4)", delta.add_(common), common)


def measure(pair: Pair, mix: Cocktail, times: int) -> dict[str, Any]:
    """One row."""
    n, device = len(pair.x), pair.x.device
    samples = [mix.draw(n, SEED, round, device) for round in range(times + 1)]
    target = torch.zeros(n, device=device)
    spent = [_spent(pair, mix, s, round, target) for round, s in enumerate(samples)]
    # the first warms up: pages, tables, kernels
    best = {name: 1e3 * min(clocks[name] for clocks in spent[1:]) for name in spent[0]}
    s = samples[-1]
    v = s.difference(pair.x, pair.common)
    packet = mix.encode(v).packet
    update = decode(packet, s.m, device)
    return {
        "data": pair.name,
        "p": mix.random_ratio,
        "K": mix.topk_ratio,
        "bits": mix.quant_bits,
        "bits_per_param": len(packet) * 8 / s.m * mix.random_ratio,
        "bound": bound(packet, s.m, update) * mix.random_ratio,
        "ratio_fp16": 16 / (len(packet) * 8 / s.m * mix.random_ratio),
        "encode_ms": best["encode"],
        "decode_ms": best["decode"],
        "reference_encode_ms": best["reference"],
        "floor_ms": best["floor"],
        "error": lost(v, update.dense()),
        "reference_error": lost(v, reference_values(v, mix.topk_ratio, mix.quant_bits)),
        "peak_vectors": peak(lambda: mix.encode(s.difference(pair.x, pair.common)).packet, s.m, device),
    }


def _spent(pair: Pair, mix: Cocktail, s: Sample, round: int, target: torch.Tensor) -> dict[str, float]:
    """Seconds of one round."""
    device = pair.x.device
    _, floor = timed(lambda: read(s, pair), device)
    packet, encode = timed(lambda: mix.encode(s.difference(pair.x, pair.common)).packet, device)
    _, back = timed(lambda: s.add_(target, decode(packet, s.m, device)), device)
    _, reference = timed(lambda: reference_packet(pair, round, mix), device)
    return {"floor": floor, "encode": encode, "decode": back, "reference": reference}


def bound(packet: bytes, m: int, update: Update) -> float:
    """Bits for each sampled element: H(K) + K (H(codes) + 16 / bucket), entropies of what was really sent."""
    density = len(update.values) / m
    codes = read_header(memoryview(packet), m).expanded().codes()
    if codes.quant_bits == 3:
        numbers = unpack(codes.packed[-(-codes.count // 8) :], 2, codes.count)
        each = 1 + entropy(np.bincount(numbers) / codes.count)
    elif codes.quant_bits <= 8:
        each = entropy(np.bincount(unpack(codes.packed, codes.quant_bits, codes.count)) / codes.count)
    else:
        each = float(codes.quant_bits)
    return entropy(np.array([density, 1 - density])) + density * (each + 16 / codes.quant_bucket_size)


def entropy(shares: np.ndarray) -> float:
    """Bits of one symbol drawn with these probabilities."""
    return -sum(p * math.log2(p) for p in shares.tolist() if p > 0)


def lost(v: torch.Tensor, sent: torch.Tensor) -> float:
    """|v - sent|^2 / |v|^2"""
    return float((v - sent).double().square().sum() / v.double().square().sum())


def read(s: Sample, pair: Pair) -> torch.Tensor:
    """The floor. On the host: gathers every sampled value of x and x' and only adds it up. On a GPU: moves
    as many bytes as that reads, in one straight copy."""
    if pair.x.is_cuda:
        return pair.x[: s.m].clone()
    total = torch.zeros(())
    units = s.units[: s.m // s.block]
    step = max((1 << 16) // s.block, 1)  # what is gathered stays in the cache
    for start in range(0, len(units), step):
        for v in (pair.x, pair.common):
            rows = v[: len(v) - len(v) % s.block].view(-1, s.block)
            total += rows.index_select(0, units[start : start + step]).sum()
    return total


def reference_packet(pair: Pair, round: int, mix: Cocktail) -> list[np.ndarray]:
    """The sections that DS3Lab/CocktailSGD would send: bitmask, codes, FP16 scales.
    compress/sparsification.py, compress/fixpoint.py there: every (1/p)-th element, torch.topk, packed
    bits."""
    every = int(1 / mix.random_ratio)
    v = pair.x[round % every :: every] - pair.common[round % every :: every]
    k = max(int(mix.topk_ratio * len(v)), 1)
    _, at = torch.topk(v.abs(), k, sorted=False)
    mask = torch.zeros(len(v), dtype=torch.bool, device=v.device)
    mask[at] = True
    codes, scale = _grid(v[mask], mix.quant_bits)
    half = 1 << (mix.quant_bits - 1) if mix.quant_bits > 1 else 0
    numbers = (codes.view(-1) + half).to(torch.uint8).cpu().numpy()
    bits = np.unpackbits(numbers[:, None], axis=1, count=min(mix.quant_bits, 8), bitorder="little")
    return [np.packbits(mask.cpu().numpy()), np.packbits(bits), scale.to(torch.float16).cpu().numpy()]


def reference_values(v: torch.Tensor, keep: float, bits: int) -> torch.Tensor:
    """What its receiver sees: exact top-K, grid -2**(q-1) .. 2**(q-1) - 1 with the largest of 128 as scale
    (one bit: sign times root mean square)."""
    k = max(round(keep * len(v)), 1)
    at = v.abs().topk(k).indices.sort().values
    codes, scale = _grid(v[at], bits)
    values = codes * scale / (1 << (bits - 1)) if bits > 1 else (2 * codes - 1) * scale
    return torch.zeros_like(v).index_copy_(0, at, values.view(-1)[:k])


def _grid(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, 128) codes and (rows, 1) scales."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 128)
    if bits == 1:
        return (rows > 0).float(), rows.square().mean(1, keepdim=True).sqrt()
    half = 1 << (bits - 1)
    scale = rows.abs().amax(1, keepdim=True)
    return (rows / scale * half).nan_to_num_().round_().clamp_(-half, half - 1), scale


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Result and seconds, with the device idle before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return result, time.perf_counter() - start


def peak(work: Callable[[], Any], m: int, device: torch.device) -> float:
    """Memory that encoding needs at most, the sampled difference included, in FP32 vectors of m."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.max_memory_allocated() - before) / (4 * m)
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / (4 * m) + 1  # the difference itself is torch's, which tracemalloc does not see


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread, as many as before afterwards. NumPy's element-wise code and zstd have no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
