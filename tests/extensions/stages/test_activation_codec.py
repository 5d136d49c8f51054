"""Both ends of a line remember the same, whatever happens on it; few bits carry an activation."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cocktail_cli.extensions.stages.compute import (
    ActivationDecoder,
    ActivationEncoder,
    ActivationMemory,
    MemoryMismatch,
    Rows,
    decode_gradient,
    encode_gradient,
)
from cocktail_cli.extensions.stages.compute.activation_codec import NONE
from compress import NonFiniteError, PacketError

COLUMNS = 16


class Line:
    """Two ends whose messages the test carries."""

    def __init__(self, bits: int = 4, places: int = 3, rows: int = 4, columns: int = COLUMNS) -> None:
        self.sender = ActivationEncoder(bits, ActivationMemory(places, rows, columns))
        self.receiver = ActivationDecoder(bits, ActivationMemory(places, rows, columns))

    def send(self, samples: list[Rows], values: torch.Tensor) -> torch.Tensor:
        """As a shell does: a mismatch costs one message more."""
        try:
            return self.receiver.decode(self.sender.encode(samples, values), samples)
        except MemoryMismatch:
            self.sender.forget(samples)
            return self.receiver.decode(self.sender.encode(samples, values), samples)


def drawn(rows: int, seed: int, columns: int = COLUMNS) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32))


KEYS = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)
FAULTS = ["none", "lost", "arrives twice", "arrives late", "sender restarts", "receiver restarts", "disk"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(KEYS, st.sampled_from(FAULTS)), max_size=8), st.sampled_from([2, 3, 4]))
def test_ends_remember_the_same_to_the_bit_whatever_happens(events: list[tuple], bits: int) -> None:
    """Messages are lost, or arrive twice or late, an end restarts, a disk flips bits: no difference is
    silent, each costs one message more, and after it the receiver has what the sender remembers."""
    line, late = Line(bits), None
    for step, (keys, fault) in enumerate(events):
        samples, values = [Rows(key, 2) for key in keys], drawn(2 * len(keys), step)
        if fault == "lost":
            late = line.sender.encode(samples, values), samples
            continue
        if fault == "sender restarts":
            line.sender = ActivationEncoder(bits, ActivationMemory(3, 4, COLUMNS))
        if fault == "receiver restarts":
            line.receiver = ActivationDecoder(bits, ActivationMemory(3, 4, COLUMNS))
        if fault == "disk":
            line.receiver.memory._values[:, 0, 0] ^= 1
        if fault == "arrives late" and late is not None:
            with contextlib.suppress(MemoryMismatch):  # or it is what is missing
                line.receiver.decode(*late)
        got = line.send(samples, values)
        for sample, part in zip(samples, got.split(2), strict=True):
            [digest, sent], [also, held] = (
                end.memory.read(sample.key, 2) for end in (line.sender, line.receiver)
            )
            assert digest == also
            assert torch.equal(sent.view(torch.int16), held.view(torch.int16))
            assert digest == NONE or torch.equal(part, held.float())
        if fault == "arrives twice":
            message = line.sender.encode(samples, values)
            assert torch.equal(line.receiver.decode(message, samples), line.receiver.decode(message, samples))
        assert len(line.sender.memory.keys) <= 3
        assert len(line.receiver.memory.keys) <= 3


@pytest.mark.parametrize(("bits", "most"), [(2, 2.5), (4, 4.5)])
def test_an_activation_takes_few_bits_and_comes_closer_each_epoch(bits: int, most: float) -> None:
    """In real bytes, headers included, of 256 rows of 128. An activation that changes little is reconstructed
    ever better: the second message leaves less than half the error of direct quantisation."""
    line, a, samples = Line(bits, rows=128, columns=128), drawn(256, 1, 128), [Rows(1, 128), Rows(2, 128)]
    errors = []
    for epoch in range(4):
        values = a + 0.01 * drawn(256, 10 + epoch, 128)
        message = line.sender.encode(samples, values)
        assert 8 * len(message) / a.numel() <= most
        errors.append(float((line.receiver.decode(message, samples) - values).norm()))
    assert errors[1] < errors[0] / 2
    assert errors[3] < errors[0] / 8


@pytest.mark.parametrize(("bits", "most", "error"), [(4, 4.2, 0.15), (8, 8.0, 0.01)])
def test_a_gradient_takes_few_bits(bits: int, most: float, error: float) -> None:
    """In real bytes, of 64 rows of 256 values with heavy tails."""
    gradient = drawn(64, 1, 256) * (1 + drawn(64, 2, 256).abs() ** 2)
    packet = encode_gradient(gradient, bits)

    assert 8 * len(packet) / gradient.numel() <= most
    assert float((decode_gradient(packet, (64, 256)) - gradient).norm() / gradient.norm()) < error


def test_nothing_is_lost_where_nothing_is_quantised() -> None:
    """With 32 bits activations and gradients arrive bit for bit, and nothing is remembered."""
    line, values = Line(32), drawn(3, 1)
    for _ in range(2):
        assert torch.equal(line.send([Rows(1, 1), Rows(2, 2)], values), values)
    assert torch.equal(decode_gradient(encode_gradient(values, 32), (3, COLUMNS)), values)
    assert line.sender.memory.keys == line.receiver.memory.keys == ()


def test_a_memory_that_is_full_or_too_short_sends_directly(tmp_path: Path) -> None:
    """Samples beyond the places, and longer ones than they hold, are quantised directly each time; a memory
    on disk gives what one in host memory does."""
    line = Line(places=2)
    line.sender.memory = ActivationMemory(2, 4, COLUMNS, tmp_path / "memory")
    for key in (1, 2, 3):
        line.send([Rows(key, 4)], drawn(4, key))
    assert line.sender.memory.keys == line.receiver.memory.keys == (1, 2)
    long = drawn(5, 4)
    assert torch.equal(line.send([Rows(4, 5)], long), line.send([Rows(4, 5)], long))
    assert line.sender.memory.keys == (1, 2)


def test_an_activation_that_is_not_finite_changes_nothing() -> None:
    """The error is that of a packet, before anything is remembered."""
    line, values = Line(), drawn(2, 1)
    line.send([Rows(1, 2)], values)
    with pytest.raises(NonFiniteError):
        line.sender.encode([Rows(1, 2)], values / 0)
    line.receiver.decode(line.sender.encode([Rows(1, 2)], values), [Rows(1, 2)])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_bytes_of_a_stranger_are_refused_or_decode(data: st.DataObject) -> None:
    """Damaged, cut or foreign bytes raise PacketError or MemoryMismatch, never another error."""
    line, samples = Line(), [Rows(1, 2), Rows(2, 2)]
    message = bytearray(line.sender.encode(samples, drawn(4, 1)))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(message[: data.draw(st.integers(0, len(message)))])
    with contextlib.suppress(PacketError, MemoryMismatch):
        assert line.receiver.decode(cut, samples).shape == (4, COLUMNS)
