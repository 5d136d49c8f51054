"""Packets kept for their sum: what they add is what the decoded update adds, to the bit."""

import zlib

import numpy as np
import pytest
import torch

from compress import Cocktail, PackedUpdate, PacketError, Update, decode, decode_packed, fingerprint
from compress.packet import STRIDE

pytest.importorskip("compress.numba_loops", reason="numba has no build for this platform")

M = 3 * STRIDE * 5 + 17


@pytest.fixture(autouse=True)
def _short_vectors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.backends.WORTH", 0)


def vector(m: int = M, seed: int = 1) -> torch.Tensor:
    """Heavy-tailed, with three stretches of zeros, whose gaps no byte holds: tokens that were not met."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(m, generator=generator) / torch.rand(m, generator=generator).add_(0.05)
    for start in (3, m // 3, m // 3 + 410):
        v[start : start + 400] = 0
    return v


SPARSE, DENSE = vector(), vector().clamp_(min=1e-3)  # the latter is sent whole
SENT = pytest.mark.parametrize(("v", "keep"), [(SPARSE, 0.2), (DENSE, 1.0)], ids=["sparse", "dense"])


def kept(packet: bytes, m: int = M) -> PackedUpdate:
    found = decode_packed(packet, m)
    assert isinstance(found, PackedUpdate)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@SENT
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("bucket", [24, 128])
def test_x_moves_as_by_the_decoded_update(v: torch.Tensor, keep: float, bits: int, bucket: int) -> None:
    """Part by part, with the fingerprint of a longer vector; and back."""
    packet = Cocktail(topk_ratio=keep, quant_bits=bits, quant_bucket_size=bucket).encode(v).packet
    update, found, sample = decode(packet, M), kept(packet), Cocktail(0.5, block_size=1).draw(2 * M, 3, 1)
    whole, start = torch.linspace(-1, 1, 2 * M + 70_001), 70_001
    x, before = whole[start:], fingerprint(whole)
    want, parts = sample.add_(x.clone(), update), range(0, found.count, STRIDE)
    moves = [sample.add_counted_(x, found, start, len(whole), slice(at, at + STRIDE)) for at in parts]

    assert same_bits(x, want)
    assert (before + sum(map(int, moves))) % (1 << 64) == fingerprint(whole)
    assert same_bits(sample.add_(x, found, -1), sample.add_(want, update, -1))


@SENT
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("bucket", [24, 128])
@pytest.mark.parametrize("wide", [1000, M - 1000])  # many buckets reach beyond a window; few do
def test_a_sum_made_window_by_window_is_that_of_the_decoded_update(
    v: torch.Tensor, keep: float, bits: int, bucket: int, wide: int
) -> None:
    packet = Cocktail(topk_ratio=keep, quant_bits=bits, quant_bucket_size=bucket).encode(v).packet
    update, found, factor = decode(packet, M), kept(packet), 1 / 3
    want, fast, slow = (torch.linspace(-1, 1, M) for _ in range(3))
    want.index_add_(0, update.positions, update.values, alpha=factor)

    for start in range(0, M, wide):
        found.add_to(fast, start, min(start + wide, M), factor)
        update.add_to(slow, start, min(start + wide, M), factor)

    assert same_bits(fast, want)
    assert same_bits(slow, want)


@SENT
def test_a_packed_update_has_the_same_values_count_and_norm_in_an_eighth_of_the_memory(
    v: torch.Tensor, keep: float
) -> None:
    packet = Cocktail(topk_ratio=keep).encode(v).packet
    update, found = decode(packet, M), kept(packet)

    assert torch.equal(found.decoded().positions, update.positions)
    assert same_bits(found.decoded().values, update.values)
    assert found.count == update.count
    assert np.float32(found.norm()) == np.float32(update.norm())
    assert found.nbytes < update.nbytes / 7


@pytest.mark.parametrize(
    ("mix", "what"),
    [
        (Cocktail(topk_ratio=0.4), "a mask"),
        (Cocktail(topk_ratio=0.001), "few, far apart"),
        (Cocktail(quant_bits=3), "codes that are not packed side by side"),
        (Cocktail(quant_bucket_size=7), "a bucket that begins within a byte"),
        (Cocktail(quant_bits=16), "numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_packet_that_cannot_stay_packed_is_decoded(mix: Cocktail, what: str) -> None:
    assert isinstance(decode_packed(mix.encode(vector()).packet, M), Update)


@SENT
@pytest.mark.parametrize("size", [STRIDE, 2 * STRIDE, M])
def test_windows_of_a_packed_update_are_the_decoded_update(v: torch.Tensor, keep: float, size: int) -> None:
    packet = Cocktail(topk_ratio=keep).encode(v).packet
    update, found, cpu = decode(packet, M), kept(packet), torch.device("cpu")
    ends = [(start, min(start + size, found.count)) for start in range(0, found.count, size)]
    windows = [found.window(*ends_of, cpu) for ends_of in ends]

    assert len(found.far) == (3 if v is SPARSE else 0)
    assert torch.equal(torch.cat([window.positions for window in windows]), update.positions)
    assert same_bits(torch.cat([window.values for window in windows]), update.values)


def test_short_vectors_do_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.backends.WORTH", M + 1)

    assert isinstance(decode_packed(Cocktail().encode(vector()).packet, M), Update)


def test_a_packet_that_decode_refuses_is_refused_in_its_words() -> None:
    packet = Cocktail().encode(vector()).packet
    damaged = packet[:200] + bytes([packet[200] ^ 1]) + packet[201:]
    unused = packet[:48] + (1 << 61).to_bytes(8, "little") + packet[56:]  # section 1, of no bytes, as zstd
    unused = unused[:4] + zlib.crc32(unused[8:]).to_bytes(4, "little") + unused[8:]
    for wrong, m in ((packet[:-1], M), (packet, M - 1), (packet[:80], M), (damaged, M), (unused, M)):
        with pytest.raises(PacketError) as here:
            decode_packed(wrong, m)
        with pytest.raises(PacketError) as there:
            decode(wrong, m)

        assert str(here.value) == str(there.value)
