"""Bytes, milliseconds and errors of the compressor, beside the reference's packet and the memory's speed.

scripts/bench_compress --params 40e6                 # Student-t(4), the settings of MEASUREMENTS.md
scripts/bench_compress --params 40e6 --record 300    # and differences recorded from 300 rounds of a run
scripts/bench_compress --params 40e6 --grid          # every K from 0.01 to 0.25 at 1, 2 and 4 bits
scripts/bench_compress --params 6.05e9 --device cuda

Each setting is measured beside its rivals in the same round: the floor (the sampled values of both models are
read once) and the reference implementation's packet. One thread, and the best of several times: other load
on the machine can only add.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from compress import Cocktail, Sample, decode, decode_packed, heavy_tailed_models
from scripts.bench.packet_bounds import entropy_bound, reference_packet, reference_values
from scripts.swarms.lab import parser

SETTINGS = ((0.2, 4), (0.08, 4), (0.05, 2))  # topk_ratio, quant_bits; the first are the reference's defaults
GRID = tuple((topk_ratio, bits) for topk_ratio in (0.01, 0.05, 0.1, 0.2, 0.25) for bits in (1, 2, 4))
RANDOM_RATIO = 0.1
TIMES = 7  # each round another sample, so that the caches do not help
ADAPTERS = (5_000_000, 40_000_000)  # dense packets of 4 bits, as `lora-cocktail` sends
SEED = 2026


@dataclass(frozen=True)
class Models:
    """A local model and the global one: their difference is what is sent."""

    name: str
    local: torch.Tensor  # (P,) float32
    shared: torch.Tensor  # (P,) float32


def bench(
    params: int,
    device: str = "cpu",
    recorded: torch.Tensor | None = None,  # (P',) differences x - x' from a real run
    settings: Sequence[tuple[float, int]] = SETTINGS,
    times: int = TIMES,
    adapters: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Measure every setting on every kind of data, and dense packets of adapters of these lengths; a row has
    the keys of `--json`."""
    pairs = [Models("student-t(4)", *heavy_tailed_models(params, device))]
    if recorded is not None:
        local = recorded.to(device, torch.float32)
        pairs.append(Models("recorded", local, torch.zeros(len(recorded), device=device)))
    with one_thread():
        mixes = [Cocktail(RANDOM_RATIO, *setting) for setting in settings]
        rows = [measure(pair, mix, times) for pair in pairs for mix in mixes]
        del pairs
        dense = (Models(f"adapters, {n / 1e6:g} M", *heavy_tailed_models(n, device)) for n in adapters)
        return rows + [measure(pair, Cocktail(1.0, 1.0, 4), min(times, 3)) for pair in dense]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render the rows as plain text, one line each under a line of names."""
    names = list(rows[0])
    cells = [[row[name] for name in names] for row in rows]
    lines = [names, *([f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def measure(pair: Models, mix: Cocktail, times: int) -> dict[str, Any]:
    """Measure one row."""
    n, device = len(pair.local), pair.local.device
    samples = [mix.draw(n, SEED, round, device) for round in range(times + 1)]
    total = torch.zeros(max(sample.m for sample in samples))
    spent = [_seconds(pair, mix, sample, round, total) for round, sample in enumerate(samples)]
    # the first warms up: pages, tables, kernels
    best = {name: 1e3 * min(clocks[name] for clocks in spent[1:]) for name in spent[0]}
    sample, p = samples[-1], mix.random_ratio
    delta = sample.difference(pair.local, pair.shared)
    packet, m = mix.encode(delta).packet, sample.m
    bits = len(packet) * 8 / m * p
    reference = reference_values(delta, mix.topk_ratio, mix.quant_bits)
    return {
        "data": pair.name,
        "p": p,
        "K": mix.topk_ratio,
        "bits": mix.quant_bits,
        "bits_per_param": bits,
        "bound": entropy_bound(packet, m) * p,
        "ratio_fp16": 16 / bits,
        "encode_ms": best["encode"],
        "decode_ms": best["decode"],
        "aggregate_ms": best["aggregate"],
        "reference_encode_ms": best["reference"],
        "floor_ms": best["floor"],
        "error": energy_lost(delta, decode(packet, m, device).dense()),
        "reference_error": energy_lost(delta, reference),
        "peak_vectors": peak(lambda: mix.encode(sample.difference(pair.local, pair.shared)), m, device),
    }


def _seconds(
    pair: Models, mix: Cocktail, sample: Sample, round: int, total: torch.Tensor
) -> dict[str, float]:
    device, every = pair.local.device, int(1 / mix.random_ratio)

    def reference() -> object:
        here = slice(round % every, None, every)
        return reference_packet(pair.local[here] - pair.shared[here], mix.topk_ratio, mix.quant_bits)

    _, floor = timed(lambda: read(sample, pair), device)
    sent, encode = timed(lambda: mix.encode(sample.difference(pair.local, pair.shared)), device)
    _, back = timed(lambda: sample.add_(pair.shared, decode(sent.packet, sample.m, device)), device)
    # taken back out: a device holds two vectors, no third
    sample.add_(pair.shared, decode(sent.packet, sample.m, device), -1)
    _, added = timed(lambda: aggregate(sent.packet, total[: sample.m]), torch.device("cpu"))
    _, theirs = timed(reference, device)
    return {"floor": floor, "encode": encode, "decode": back, "aggregate": added, "reference": theirs}


def aggregate(packet: bytes, total: torch.Tensor) -> None:
    """Do what an aggregator does with the packet of one of many peers; total: (m,) on the host."""
    update = decode_packed(packet, len(total))
    update.norm()
    update.add_to(total, 0, len(total), 0.125)


def energy_lost(delta: torch.Tensor, sent: torch.Tensor) -> float:
    """Return |delta - sent|^2 / |delta|^2."""
    return float((delta - sent).double().square().sum() / delta.double().square().sum())


def read(sample: Sample, pair: Models) -> torch.Tensor:
    """Read the sampled values once: the host gathers those of both models, a GPU copies as many bytes."""
    if pair.local.is_cuda:
        return pair.local[: sample.m].clone()
    total, block = torch.zeros(()), sample.block_size
    units = sample.units[: sample.m // block]
    step = max((1 << 16) // block, 1)  # what is gathered stays in the cache
    for start in range(0, len(units), step):
        for model in (pair.local, pair.shared):
            rows = model[: len(model) - len(model) % block].view(-1, block)
            total += rows.index_select(0, units[start : start + step]).sum()
    return total


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result and the seconds, with the device idle before and after."""

    def idle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    idle()
    start = time.perf_counter()
    result = work()
    idle()
    return result, time.perf_counter() - start


def peak(work: Callable[[], Any], m: int, device: torch.device) -> float:
    """Return the peak memory of encoding, the sampled difference included, in FP32 vectors of m."""
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
    """Run torch on one thread, and on as many as before afterwards. NumPy's loops and zstd have no more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recorded(topk_ratio: float, bits: int, rounds: int) -> torch.Tensor | None:
    """Train a small model for so many rounds; x_i - x' of a peer (P,), which its next packet is taken
    from."""
    from recipes.training.optimizers import learning_rate
    from scripts.study.train import ByteModel, Setting, Size, Swarm, documentation, new_model, steps

    size = Size(hidden=128, layers=4, steps=rounds)
    setting = Setting(sample=RANDOM_RATIO, keep=topk_ratio, bits=bits)
    training = setting.training(rate=1e-3, seed=1, steps=rounds)
    swarm = Swarm(ByteModel(size, new_model(size).vector.clone()), setting, training)
    difference = None
    for step in steps(size, swarm, documentation(size.length)[0], learning_rate(training, rounds)):
        if step == rounds - 1:
            difference = swarm.peers[0].flat.vector - swarm.shared
    return difference


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--params", type=float, default=40e6, help="length of the vector")
    asked.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    asked.add_argument("--record", type=int, default=0, metavar="ROUNDS", help="and on differences of a run")
    asked.add_argument("--grid", action="store_true", help="K in 0.01 .. 0.25, 1, 2 and 4 bits")
    asked.add_argument("--times", type=int, default=7, help="repetitions; the best counts")
    asked.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = asked.parse_args()
    difference = recorded(*SETTINGS[0], args.record) if args.record else None
    settings, adapters = GRID if args.grid else SETTINGS, ADAPTERS if args.params >= 40e6 else ()
    rows = bench(int(args.params), args.device, difference, settings, args.times, adapters)
    print(json.dumps({"v": 1, "date": time.strftime("%Y-%m-%d"), "rows": rows}) if args.json else table(rows))


if __name__ == "__main__":
    main()
