"""bench_compress and bench_step measure what they say; and sizes are near what entropy allows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compress import Cocktail, entropy, heavy_tailed_models
from scripts.bench.compress import GRID, SETTINGS, bench, energy_lost, table
from scripts.bench.packet_bounds import entropy_bound, reference_packet, reference_values

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["data", "p", "K", "bits", "bits_per_param", "bound", "ratio_fp16", "encode_ms", "decode_ms"]
KEYS += ["reference_encode_ms", "floor_ms", "error", "reference_error"]


@pytest.fixture(scope="module")
def long() -> torch.Tensor:
    """2 M heavy-tailed differences, as much as 20 M parameters sample at p = 0.1."""
    return torch.from_numpy(np.random.default_rng(1).standard_t(4, 2_000_000).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("setting", GRID, ids=lambda s: f"{s[0]}-{s[1]}")
def test_packets_are_within_five_percent_of_what_entropy_allows(
    setting: tuple[float, int], long: torch.Tensor
) -> None:
    packet = Cocktail(0.1, *setting).encode(long).packet

    assert len(packet) * 8 / len(long) < 1.05 * entropy_bound(packet, len(long))


def test_a_row_holds_every_promised_key_and_plausible_numbers() -> None:
    (row,) = bench(200_000, settings=SETTINGS[:1], times=1)

    assert set(KEYS) <= set(row)
    assert row["bits_per_param"] == pytest.approx(0.135, rel=0.1)
    assert row["ratio_fp16"] == pytest.approx(16 / row["bits_per_param"])
    assert 0 < row["error"] < row["reference_error"] < 1
    assert min(row[name] for name in KEYS if name.endswith("_ms")) > 0
    assert 1 < row["peak_vectors"] < 40  # of a short vector: fixed tables weigh
    json.dumps(row)


def test_dense_packets_of_adapters_have_rows_of_all_their_values() -> None:
    *_, row = bench(50_000, settings=SETTINGS[:1], times=1, adapters=[300_000])

    assert (row["data"], row["p"], row["K"]) == ("adapters, 0.3 M", 1.0, 1.0)
    assert row["bits_per_param"] == pytest.approx(row["bound"], rel=0.05)


def test_recorded_differences_make_rows_of_their_own() -> None:
    rows = bench(50_000, recorded=torch.randn(60_000), settings=SETTINGS[:2], times=1)

    assert [row["data"] for row in rows] == ["student-t(4)"] * 2 + ["recorded"] * 2


def test_the_codec_benchmark_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    bench(10_000, settings=SETTINGS[:1], times=1)

    assert torch.get_num_threads() == before


def test_the_codec_table_has_a_line_for_each_row_below_its_titles() -> None:
    lines = table(
        [{"data": "a", "p": 0.1, "ms": 12.34567}, {"data": "bcd", "p": 0.25, "ms": 3.0}]
    ).splitlines()

    assert [line.split() for line in lines] == [
        ["data", "p", "ms"],
        ["a", "0.1", "12.35"],
        ["bcd", "0.25", "3"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_the_data_is_student_with_four_degrees_of_freedom() -> None:
    local_model, global_model = heavy_tailed_models(1_000_000)
    t = (local_model - global_model) / 1e-4

    assert float(t.abs().median()) == pytest.approx(0.741, rel=0.02)  # its quartile
    assert float((t.abs() > 2.776).float().mean()) == pytest.approx(0.05, rel=0.05)


def test_the_reference_sends_a_bitmask_codes_and_scales() -> None:
    """p (1 + K (q + 16/128)) bits for each parameter."""
    sent = sum(part.nbytes for part in reference_packet(torch.randn(12_800), 0.2, 4))

    assert sent * 8 / 128_000 == pytest.approx(0.1825, rel=0.001)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_reference_keeps_the_largest_and_clips_the_top_of_its_grid(bits: int) -> None:
    v = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    there = reference_values(v, 0.1, bits)

    assert int((v.abs() >= v.abs().topk(100).values[-1]).sum()) == 100
    assert bool((there[v.abs() < v.abs().topk(100).values[-1]] == 0).all())
    if bits > 1:
        top = float(v.abs().max())
        assert float(there.max()) <= top * (1 - 2 ** (1 - bits)) + 1e-6
    assert 0 < energy_lost(v, there) < 0.9


def test_entropy_of_a_coin_is_one_bit() -> None:
    assert entropy(np.array([0.5, 0.5])) == 1.0
    assert entropy(np.array([1.0, 0.0])) == 0.0


def told(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script and return the object that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.bench.{script}", *arguments, "--json"],
        capture_output=True, text=True, timeout=600, check=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.usefixtures("fast_starts")
def test_bench_compress_prints_one_json_object() -> None:
    found = told("compress", "--params", "1e5", "--times", "1")

    assert found["v"] == 1
    assert all(set(KEYS) <= set(row) for row in found["rows"])


@pytest.mark.slow
@pytest.mark.usefixtures("fast_starts")
def test_bench_step_measures_a_step_without_a_network() -> None:
    small = ["data.max_length=32", "global_batch_size=4", "compression.local_steps=2"]
    row = told("step", "smoke", *small, "--peers", "2", "--steps", "3", "--device", "cpu")

    assert (row["v"], row["samples"], row["parameters"]) == (1, 2, 1_012_992)
    assert 0 < row["tokens"] <= 2 * 32
    assert 0 < row["compute_s"] <= row["step_s"] <= row["slowest_s"]
    assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["step_s"])
