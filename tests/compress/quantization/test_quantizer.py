"""Codes and back: exact arithmetic, bounded error, unbiased where it says so, any magnitude."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compress.quantization import BITS, bf16, dequantize, packed_size, planes, quantize, table_size, widen

RNG = np.random.default_rng(0)
LARGE = float(np.finfo(np.float32).max)
# what top-K lets through
sent = st.floats(2.0**-99, LARGE, width=32) | st.floats(-LARGE, -(2.0**-99), width=32)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40)
@given(v=hnp.arrays(np.float32, st.integers(0, 50), elements=sent), bucket=st.sampled_from([1, 7, 16, 128]))
def test_codes_have_their_announced_sizes_and_finite_values(bits: int, v: np.ndarray, bucket: int) -> None:
    codes = quantize(v, bits, bucket)
    back = dequantize(codes)

    assert len(codes.packed) == packed_size(bits, len(v))
    assert len(codes.levels) == table_size(bits)
    assert len(codes.scales) == (0 if bits == 32 else -(-len(v) // bucket))
    assert back.shape == v.shape
    assert back.dtype == np.float32
    assert np.isfinite(back).all()
    assert ((back == 0) | (np.abs(back) >= 2.0**-126)).all()  # no denormal ever
    assert ((back == 0) | (np.sign(back) == np.sign(v))).all()


@pytest.mark.parametrize("bits", [b for b in BITS if b < 32])
def test_a_value_is_an_integer_times_a_scale_and_exact(bits: int) -> None:
    """At most 24 significant bits, so FP32 holds the product: float64 agrees."""
    v = (RNG.standard_t(3, 5000) * np.exp(RNG.standard_normal(5000) * 9)).astype(np.float32)
    codes = quantize(v, bits, 128)

    back = dequantize(codes).astype(np.float64)

    scale = widen(codes.scales).astype(np.float64).repeat(128)[: len(v)]
    assert (codes.scales < 0x7F80).all()
    number = back / scale
    assert (number == np.rint(number)).all()
    assert np.abs(number).max() <= 65535


def test_thirty_two_bits_are_the_values_themselves() -> None:
    v = np.float32([1.1, -0.0, 1e-45, 3e38, 0])

    assert dequantize(quantize(v, 32, 128)).tobytes() == v.tobytes()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 3.4e38])
def test_all_equal_values_come_back_nearly_equal(bits: int, size: float) -> None:
    v = np.full(300, size, np.float32)
    v[::2] *= -1

    back = dequantize(quantize(v, bits, 128))

    # half a step of the scale's 8 bits, one where it must not overflow
    assert back == pytest.approx(v, rel=0.008)


@pytest.mark.parametrize("bits", BITS)
def test_a_single_value_comes_back(bits: int) -> None:
    for x in (1.0, -3e-20, 2.5e38):
        assert dequantize(quantize(np.float32([x]), bits, 128)) == pytest.approx([x], rel=0.008)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_one_huge_value_is_not_clipped_to_the_levels_of_the_others(bits: int) -> None:
    v = RNG.standard_t(4, 128 * 60).astype(np.float32)
    v = v[np.abs(v) > 1][: 128 * 10]
    v[700] = 1e20

    back = dequantize(quantize(v, bits, 128))

    assert back[700] == pytest.approx(1e20, rel=0.35)
    assert np.abs(back[:512]).max() < 10 * np.abs(v[:512]).max()


def test_bf16_rounds_to_nearest_or_up_and_never_to_infinity() -> None:
    x = np.float32([1.0, 1.003, 1.0001, 3.4e38, 0])

    assert bf16(x, up=False).tolist() == pytest.approx([1.0, 1.0, 1.0, 3.39e38, 0], rel=0.004)
    assert (bf16(x, up=True)[:3] >= x[:3]).all()
    assert np.isfinite(bf16(x, up=True)).all()


def test_planes_put_like_bytes_together_and_back() -> None:
    data = np.arange(12, dtype=np.uint8)

    assert planes(data, 4).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert planes(planes(data, 4), -4).tolist() == data.tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1.0), st.sampled_from([1.0, 50.0, 1e4]))
def test_evenly_spaced_levels_clip_nothing_however_large_an_outlier_is(
    seed: int, step: float, outlier: float
) -> None:
    """No value is further from its level than half a step, or half of a 127th of its bucket's largest."""
    values = np.random.default_rng(seed).standard_normal(4096).astype(np.float32)
    values[::1000] *= np.float32(outlier)
    codes = quantize(values, 8, 256, step=step)

    error, largest = np.abs(dequantize(codes) - values), np.abs(values.reshape(16, 256)).max(1)
    mean = np.square(values).mean() / np.square(largest).mean()
    apart = np.repeat(max(step * np.sqrt(mean), 1 / 127) * largest, 256)
    assert (error <= 0.51 * apart + 0.005 * np.abs(values)).all()


def test_evenly_spaced_levels_lose_half_of_what_sixteen_fitted_ones_do() -> None:
    """At 4.5 bits a value after entropy coding, by the shares of the codes."""
    values = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    even, fitted = quantize(values, 8, 2048, step=0.23), quantize(values, 4, 128)
    lost = [np.square(dequantize(codes) - values).sum() for codes in (even, fitted)]
    share = np.bincount(even.packed, minlength=256) / len(values)

    assert lost[0] < lost[1] / 2
    assert -(share[share > 0] * np.log2(share[share > 0])).sum() < 4.5
