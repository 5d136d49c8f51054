"""The compiled loops against NumPy's: the same bytes, whatever the data."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress import Cocktail, NonFiniteError, decode, topk
from compress import backends as dispatch

compiled = pytest.importorskip("compress.numba_loops", reason="numba has no build for this platform")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _short_vectors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORTH", 0)


def vector(kind: str, m: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(m, generator=g)
    return {
        "gaussian": v,
        "heavy": v / torch.rand(m, generator=g).square(),
        "outliers": torch.where(torch.arange(m) % 700 == 5, 300 * v, v),
        "ties": v.round(),
        "equal": torch.full((m,), -0.5),
        "zeros": torch.zeros(m),
        "sparse": torch.where(torch.arange(m) % 3000 == 0, v, torch.zeros(m)),
        "layers": v * (torch.arange(m) // 500 % 7),
        "huge": v * 1e37,
        "denormal": v * 1e-41,
        "small": v * 2.0**-99,
    }[kind]


KINDS = [
    "gaussian",
    "heavy",
    "outliers",
    "ties",
    "equal",
    "zeros",
    "sparse",
    "layers",
    "huge",
    "denormal",
    "small",
]


@pytest.mark.parametrize("m", [0, 1, 63, 64, 65, 6001, 70_000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packet_has_the_same_bytes_as_numpys(kind: str, m: int) -> None:
    v = vector(kind, m)

    for bits in (1, 2, 3, 4, 8, 16, 32):
        mix = Cocktail(topk_ratio=0.2, quant_bits=bits)
        assert mix.encode(v).packet == mix.encode(v, kernels=False).packet, bits


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "layers", "sparse", "ties"])
def test_the_same_bytes_where_the_threshold_comes_from_a_sample(kind: str) -> None:
    v = vector(kind, topk.SAMPLED + 12_345)

    assert Cocktail().encode(v).packet == Cocktail().encode(v, kernels=False).packet


@given(
    st.integers(1, 3000),
    st.integers(0, 1000),
    st.sampled_from(KINDS),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([0.01, 0.2, 0.5, 1.0]),
    st.sampled_from([1, 7, 128, 1000]),
)
@settings(max_examples=40)
def test_the_same_bytes_for_any_mix(
    m: int, seed: int, kind: str, bits: int, keep: float, bucket: int
) -> None:
    before, dispatch.WORTH = dispatch.WORTH, 0  # hypothesis runs all examples under one fixture
    mix = Cocktail(topk_ratio=keep, quant_bits=bits, quant_bucket_size=bucket)
    v = vector(kind, m, seed)

    fast, slow = mix.encode(v).packet, mix.encode(v, kernels=False).packet

    dispatch.WORTH = before
    assert fast == slow


@pytest.mark.parametrize("keep", [0.001, 0.05, 0.2])
@pytest.mark.parametrize("kind", ["gaussian", "sparse", "layers"])
def test_a_packet_decodes_to_the_same_bits_as_with_numpy(kind: str, keep: float) -> None:
    v = vector(kind, 70_000)
    packet = Cocktail(topk_ratio=keep).encode(v).packet

    fast, slow = decode(packet, len(v)), decode(packet, len(v), kernels=False)

    assert torch.equal(fast.positions, slow.positions)
    assert torch.equal(fast.values, slow.values)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_value_is_found_at_the_same_position(wrong: float) -> None:
    v = vector("gaussian", 5000)
    v[4321] = wrong

    with pytest.raises(NonFiniteError) as fast:
        Cocktail().encode(v)
    with pytest.raises(NonFiniteError) as slow:
        Cocktail().encode(v, kernels=False)

    assert fast.value.position == slow.value.position == 4321


@pytest.mark.parametrize(("n", "block"), [(5000, 1), (5003, 16), (70_001, 64), (70_001, 256)])
def test_differences_are_those_of_torch(n: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = vector("gaussian", n), vector("heavy", n, 2)
    mixes = [Cocktail(random_ratio=share, block_size=block) for share in (0.3, 1.0)]
    samples = [mix.draw(n, 7, round) for mix in mixes for round in range(4)]  # a short last block too
    fast = [sample.difference(x, y) for sample in samples]
    monkeypatch.setattr(dispatch, "WORTH", 1 << 62)

    assert all(torch.equal(a, s.difference(x, y)) for a, s in zip(fast, samples, strict=True))


def test_the_longest_gap_is_returned() -> None:
    out = np.empty(3, np.uint8)

    assert compiled.gaps(np.array([0, 255, 256], np.int32), out) == 254
    assert out.tolist() == [0, 254, 0]
    assert compiled.gaps(np.array([300, 301, 302], np.int32), out) == 300


def test_an_escape_among_gaps_is_not_taken_for_a_gap() -> None:
    out = np.empty(3, np.int64)

    assert compiled.positions(np.array([0, 254, 3], np.uint8), -1, out)
    assert out.tolist() == [0, 255, 259]
    assert not compiled.positions(np.array([0, 255, 3], np.uint8), -1, out)


def test_without_a_writable_folder_loops_are_compiled_uncached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = compiled.numba.njit

    def without_a_folder(cache: bool = False, **options: bool) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(compiled.numba, "njit", without_a_folder)

    assert compiled.loop(lambda a: a + 1)(1) == 2


def test_without_numba_numpy_makes_the_same_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    v = vector("heavy", 5000)
    packet = Cocktail().encode(v).packet
    monkeypatch.setitem(sys.modules, "compress.numba_loops", None)
    monkeypatch.delattr("compress.numba_loops")
    dispatch._compiled.cache_clear()

    try:
        assert dispatch.compiled(5000) is None
        assert Cocktail().encode(v).packet == packet
    finally:
        dispatch._compiled.cache_clear()


@pytest.mark.slow
def test_importing_compress_and_short_vectors_leave_numba_and_triton_alone() -> None:
    code = "import sys, torch, compress; compress.Cocktail().encode(torch.ones(100)); "
    code += "print({'numba', 'triton'} & sys.modules.keys())"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)

    assert done.stdout.strip() == "set()", done.stderr
