"""The Triton kernels, under Triton's interpreter, against the host's code: same survivors, same bits.

On a real GPU the same tests run on its tensors.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compress import Cocktail, NonFiniteError, PacketError, decode
from compress.coding import GAPS, STORED, EncodedPositions, Section, byte_kind, encode_positions, expand
from compress.packet import BODY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M = 6000
FOLDER = Path(__file__).parents[1]

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is first imported, and by each kernel
pytest.importorskip("triton", reason="Triton has no build for this platform")


def vector(kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    v = torch.randn(M, generator=g)
    made = {
        "gaussian": v,
        "heavy": v / torch.rand(M, generator=g).sqrt(),
        "outliers": torch.where(torch.arange(M) % 700 == 5, 300 * v, v),
        "ties": v.round(),
        "zeros": torch.zeros(M),
        "sparse": torch.where(torch.arange(M) % 50 == 0, v, torch.zeros(M)),
        "huge": v * 1e37,
        "denormal": v * 1e-41,
    }
    return made[kind].to(DEVICE)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16, 32])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outliers"])
def test_a_packet_decodes_to_the_same_bits_on_host_and_device(kind: str, bits: int) -> None:
    packet = Cocktail(topk_ratio=0.2, quant_bits=bits).encode(vector(kind), kernels=False).packet

    here = decode(packet, M, kernels=False)
    there = decode(packet, M, device=DEVICE, kernels=True)

    assert torch.equal(here.positions, there.positions.cpu())
    assert torch.equal(here.values.view(torch.int32), there.values.cpu().view(torch.int32))


@pytest.mark.parametrize(
    "kind", ["gaussian", "heavy", "outliers", "ties", "zeros", "sparse", "huge", "denormal"]
)
@pytest.mark.parametrize("keep", [0.01, 0.3])
def test_host_and_device_select_the_same_elements(kind: str, keep: float) -> None:
    v, mix = vector(kind), Cocktail(topk_ratio=keep)

    here, there = (decode(mix.encode(v, kernels=k).packet, M) for k in (False, True))

    assert torch.equal(here.positions, there.positions)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 16, 32])
def test_the_update_that_encode_returns_is_what_its_packet_decodes_to(bits: int) -> None:
    sent = Cocktail(quant_bits=bits).encode(vector("heavy"), kernels=True)
    update, want = sent.update(), decode(sent.packet, M)

    assert torch.equal(update.positions, want.positions)
    assert torch.equal(update.values.view(torch.int32), want.values.view(torch.int32))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["gaussian", "heavy", "outliers"])
def test_the_device_loses_as_much_as_the_host(kind: str, bits: int) -> None:
    v, mix = vector(kind), Cocktail(topk_ratio=0.3, quant_bits=bits)
    lost = [
        float((decode(mix.encode(v, kernels=k).packet, M).dense() - v.cpu()).square().sum())
        for k in (False, True)
    ]

    assert lost[1] == pytest.approx(lost[0], rel=1e-3)


@pytest.mark.parametrize("bits", [2, 8])
def test_buckets_that_are_no_power_of_two_go_through_the_host(bits: int) -> None:
    v, mix = vector("gaussian"), Cocktail(quant_bits=bits, quant_bucket_size=100)

    assert mix.encode(v, kernels=True).packet == mix.encode(v, kernels=False).packet


def test_the_identity_and_an_empty_vector_are_encoded_as_on_the_host() -> None:
    mix = Cocktail(random_ratio=1, topk_ratio=1, quant_bits=32)
    for v in (vector("gaussian"), torch.empty(0, device=DEVICE)):
        assert mix.encode(v, kernels=True).packet == mix.encode(v, kernels=False).packet


def test_a_nonfinite_number_is_found_on_the_device() -> None:
    v = vector("gaussian")
    v[4321] = float("inf")

    with pytest.raises(NonFiniteError) as caught:
        Cocktail(topk_ratio=0.01).encode(v, kernels=True)
    assert caught.value.position == 4321


@pytest.mark.parametrize("n", [1000, 5003])
def test_difference_and_addition_are_those_of_the_host(n: int) -> None:
    from compress import triton_kernels as vectors

    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(n, generator=g), torch.randn(n, generator=g)
    s = Cocktail(random_ratio=0.4, block_size=16).draw(n, 1, 3)
    there = torch.empty(s.m, device=DEVICE)

    vectors.difference(x.to(DEVICE), y.to(DEVICE), s.units.to(DEVICE), s.block_size, there)

    here = s.difference(x, y)
    assert torch.equal(here, there.cpu())

    update = decode(Cocktail().encode(here).packet, s.m)
    moved = x.to(DEVICE, copy=True)
    vectors.add(moved, s.coordinates(update.positions).to(DEVICE), update.values.to(DEVICE), -1)
    assert torch.equal(s.add_(x.clone(), update, alpha=-1), moved.cpu())


@pytest.mark.parametrize("kind", ["heavy", "ties", "one size"])
def test_long_vectors_take_the_sampled_threshold(kind: str) -> None:
    """Selection alone, with a sample as small as a test can afford. After Adam's first step all are equal."""
    from compress import topk
    from compress import triton_kernels as select

    v = vector("gaussian").sign().repeat(4) if kind == "one size" else vector(kind).repeat(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "SAMPLED", 2000)
        there = select.largest(v, select.first_look(len(v), len(v) // 5))
        here = topk.largest(v.cpu().numpy(), len(v) // 5)

    assert int(there.count) == len(here.positions)
    assert np.array_equal(here.positions, there.positions.cpu().numpy()[: there.count])
    assert np.array_equal(here.values, there.values.cpu().numpy()[: there.count])


def test_of_a_sample_that_misleads_no_more_values_are_counted_than_there_is_room_for() -> None:
    """Kernels write as many codes as are counted. All lines but those of the sample are longer."""
    from compress import topk
    from compress import triton_kernels as select

    v = vector("gaussian").repeat(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "SAMPLED", 2000)
        longer = torch.full((len(v) // topk.LINE, 1), 2.0, device=DEVICE)
        longer[:: topk.stride(len(v))] = 1.0
        v.view(-1, topk.LINE).mul_(longer)
        found = select.largest(v, replace(select.first_look(len(v), len(v) // 3), cut=False))

    assert int(found.numbers[2]) > len(found.values) == int(found.count)


@pytest.mark.parametrize(
    ("gap", "every"), [(0, 7), (254, 7), (255, 7), (600, 7), (3, 2), (0, 1)], ids=lambda value: str(value)
)
def test_the_device_encodes_positions_as_the_host_does(gap: int, every: int) -> None:
    """A gap that no byte holds, as embeddings leave that no token has met, costs some bytes, and no more;
    crowded positions leave as a mask, and all of them as nothing."""
    from compress import triton_kernels as select

    at = torch.cat([torch.arange(0, 30_000, every), torch.arange(30_000 + gap, 60_000, every)])
    k = len(at)
    room = torch.nn.functional.pad(at, (0, 9), value=60_000).to(DEVICE)
    sent = select.coded(room, torch.tensor(k, device=DEVICE), 60_000, byte_kind(k, 60_000))
    there = sent.read(k, *(part.cpu().numpy().view(np.uint8) for part in sent.parts))

    assert len(sent.parts) == 2
    assert there == encode_positions(at.numpy(), 60_000)
    raw = replace(there, main=Section(STORED, there.main.raw, bytes(expand(there.main))))
    assert torch.equal(select.decode_positions(raw, 60_000, len(at), torch.device(DEVICE)).cpu(), at)


@pytest.mark.parametrize(("gaps", "m"), [([3, 255], 300), ([3, 9], 10), ([255, 1], 900)])
def test_impossible_gaps_are_refused_on_the_device(gaps: list[int], m: int) -> None:
    from compress import triton_kernels as select

    coded = EncodedPositions(GAPS, 0, Section(STORED, len(gaps), bytes(gaps)), Section(STORED, 0, b""))

    with pytest.raises(PacketError):
        select.decode_positions(coded, m, len(gaps), torch.device(DEVICE))


def test_the_device_adds_up_gaps() -> None:
    """Long packets hold gaps of a byte each."""
    v = torch.randn(40_000, generator=torch.Generator().manual_seed(4))
    packet = Cocktail(topk_ratio=0.2, quant_bits=1).encode(v).packet

    there = decode(packet, len(v), device=DEVICE, kernels=True)

    assert BODY.unpack_from(packet, 8)[4] == GAPS
    assert torch.equal(there.positions.cpu(), decode(packet, len(v)).positions)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU compiles them anyway")
def test_the_kernels_compile_for_gpus_that_are_not_there() -> None:
    """The interpreter is lenient, compilers are not. Decoders flush no denormals, no kernel has a stack."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run(
        [sys.executable, str(FOLDER / "compile_kernels.py")],
        capture_output=True, text=True, timeout=600, env=environment,
    )  # fmt: skip

    assert told.returncode == 0, told.stderr[-2000:]
    targets = json.loads(told.stdout.splitlines()[-1])
    assert len(targets) == 6
    for target, kernels in targets.items():
        for name, (length, flushes, stack) in kernels.items():
            assert length > 1000, (target, name)
            assert stack == 0, (target, name, stack)
            assert not (flushes and name.startswith(("add", "dequantize"))), (target, name)
