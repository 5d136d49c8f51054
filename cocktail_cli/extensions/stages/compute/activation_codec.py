"""AQ-SGD (Wang et al., NeurIPS 2022): activations as quantised changes of what both ends remember.

    sender      m' = m + C[a - m]     sends C[a - m]        m: of this sample; 0 at first
    receiver    m' = m + C[a - m]     computes with m'

C is the room's quantizer without sampling and top-k, and m' is rounded to bfloat16. A decoded value is exact
in FP32, so both ends have the same m' to the bit. Each message has the digests of m and of m'. A receiver
that differs for whatever reason (a lost message, a restart, a damaged disk) says so, both ends forget the
samples of the message, and they are sent again, quantised directly.

A message:  "CA", version 1, bits | samples, u32 | columns, u32 | of each sample its key u64, rows u32, digest
of m, digest of m' (8 bytes each; zeros: not remembered) | one packet (FORMAT.md) of all rows.

A memory has a fixed number of places, on disk or in host memory. When they are taken, further samples are not
remembered: samples come again once an epoch, so that giving a place to a newer one would lose both.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from compress.codec import Cocktail
from compress.errors import PacketError
from compress.packet import decode

NONE = bytes(8)  # digest of a sample that is not remembered


@dataclass(frozen=True)
class Held:
    """A remembered sample."""

    place: int
    rows: int
    digest: bytes  # (8,) of its bytes when they were written


class ActivationMemory:
    """Activations (rows, columns) of up to `places` samples, by a 64-bit key.

    Args:
        most_rows: of a sample; longer ones are not remembered.
        file: a new file on disk, sparse at first; None: host memory.
    """

    def __init__(self, places: int, most_rows: int, columns: int, file: Path | None = None) -> None:
        if min(places, most_rows, columns) < 1:
            raise ValueError(f"a memory of {places} samples of {most_rows} rows of {columns} values")
        self.places, self.most_rows, self.columns = places, most_rows, columns
        shape = (places, most_rows, columns)
        self._values: np.ndarray  # bfloat16 patterns
        if file is None:
            self._values = np.zeros(shape, np.int16)
        else:
            self._values = np.memmap(file, np.int16, "w+", shape=shape)
        self._free = list(reversed(range(places)))
        self._held: dict[int, Held] = {}

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(sorted(self._held))

    def admits(self, key: int, rows: int) -> bool:
        """Tell whether a sample is remembered, or could be."""
        return 0 < rows <= self.most_rows and (key in self._held or bool(self._free))

    def read(self, key: int, rows: int) -> tuple[bytes, torch.Tensor]:
        """Return a sample's digest and its activations, (rows, columns) bfloat16; NONE and zeros if it is not
        remembered. One whose bytes have changed since they were written is forgotten."""
        held = self._held.get(key)
        if held is not None and held.rows == rows:
            found = np.array(self._values[held.place, :rows])
            if digest_of(found) == held.digest:
                return held.digest, torch.from_numpy(found).view(torch.bfloat16)
        self.forget(key)
        return NONE, torch.zeros(rows, self.columns, dtype=torch.bfloat16)

    def write(self, key: int, values: torch.Tensor) -> bytes:
        """Remember the activations of an admitted sample, (rows, columns), in bfloat16; returns their
        digest."""
        patterns = patterns_of(values)
        held, digest = self._held.get(key), digest_of(patterns)
        place = self._free.pop() if held is None else held.place
        self._values[place, : len(patterns)] = patterns
        self._held[key] = Held(place, len(patterns), digest)
        return digest

    def make_room(self, key: int, keep: Collection[int]) -> None:
        """Give a sample a place: where none is free, that of the oldest one outside `keep`.

        Only a receiver whose sender has lost samples has to.
        """
        if key not in self._held and not self._free:
            self.forget(next(old for old in self._held if old not in keep))

    def forget(self, key: int) -> None:
        """Free the place of a sample, if it has one."""
        held = self._held.pop(key, None)
        if held is not None:
            self._free.append(held.place)


def patterns_of(values: torch.Tensor) -> np.ndarray:
    """View bfloat16 values on any device as (rows, columns) int16 on the host."""
    patterns: np.ndarray = values.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy()
    return patterns


def digest_of(patterns: np.ndarray) -> bytes:
    """Hash patterns to 8 bytes, never to those of NONE."""
    found = hashlib.blake2b(np.ascontiguousarray(patterns).view(np.uint8).data, digest_size=8).digest()
    return found if found != NONE else b"\x01" + NONE[1:]


MAGIC, VERSION = b"CA", 1
HEAD = struct.Struct("<2sBBII")  # magic, version, bits, samples, columns
ENTRY = struct.Struct("<QI8s8s")  # key, rows, digest before, digest after
BUCKET = 128  # neighbours in a row that share a scale
GRADIENT_BUCKET = 1024  # so that 8 bits a value are 8.02, and less after entropy coding
EVEN_BUCKET, EVEN_STEP = 2048, 0.23  # of levels that are evenly spaced: at 4 bits they take up to 4.5


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch that are one sample's."""

    key: int  # the same whenever this sample comes, 64 bits
    count: int


class MemoryMismatch(Exception):
    """The ends of a line remember the samples of a message differently. The receiver has forgotten them; the
    sender is to `forget` them too, and to encode them again.
    """


class ActivationEncoder:
    """The sender's end.

    Args:
        bits: of a code, 2 to 4 are usual; 4: evenly spaced levels, whose entropy coding takes up to 4.5, with
            a third of the error of 16 levels; 32: nothing is quantised or remembered.
        memory: of the size that both ends agreed on.
    """

    def __init__(self, bits: int, memory: ActivationMemory) -> None:
        self.bits, self.memory = bits, memory
        if bits == 4:
            self._cocktail = Cocktail(1.0, 1.0, 8, quant_bucket_size=EVEN_BUCKET, quant_step=EVEN_STEP)
        else:
            self._cocktail = Cocktail(1.0, 1.0, bits, quant_bucket_size=BUCKET)

    def encode(self, samples: Sequence[Rows], values: torch.Tensor) -> bytes:
        """Encode the activations of samples, (rows, columns), and remember what the receiver reconstructs.

        Errors: NonFiniteError: nothing is remembered then.
        """
        known = [self.memory.read(each.key, each.count) for each in samples]
        before = torch.cat([held for _, held in known]).to(values.device).float()
        packet = self._cocktail.encode((values.float() - before).reshape(-1)).packet
        made = reconstruct(before, packet, self.bits)
        after = torch.split(made, [each.count for each in samples])
        entries = []
        for each, part, (digest, _) in zip(samples, after, known, strict=True):
            kept = self.bits < 32 and self.memory.admits(each.key, each.count)
            written = self.memory.write(each.key, part) if kept else NONE
            entries.append(ENTRY.pack(each.key, each.count, digest, written))
        head = HEAD.pack(MAGIC, VERSION, self.bits, len(samples), values.shape[1])
        return b"".join([head, *entries, packet])

    def forget(self, samples: Sequence[Rows]) -> None:
        """Forget the samples of a message that the receiver has refused with MemoryMismatch."""
        for each in samples:
            self.memory.forget(each.key)


class ActivationDecoder:
    """The receiver's end; `bits` and the size of `memory` are those of the sender."""

    def __init__(self, bits: int, memory: ActivationMemory) -> None:
        self.bits, self.memory = bits, memory

    def decode(
        self, message: bytes, samples: Sequence[Rows], device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Decode the activations of samples that the receiver knows to come: (rows, columns) float32.

        A message that was decoded before gives the same again.

        Errors: PacketError: no message of these samples; MemoryMismatch.
        """
        digests, packet = self._parse(message, samples)
        known = [self.memory.read(each.key, each.count) for each in samples]
        if any(
            digest not in (before, after) for (before, after), (digest, _) in zip(digests, known, strict=True)
        ):
            self._mismatch(samples)
        held = torch.cat([values for _, values in known]).to(device).float()
        counts = [each.count for each in samples]
        made = list(torch.split(reconstruct(held, packet, self.bits), counts))
        remembered = {each.key for each, (_, after) in zip(samples, digests, strict=True) if after != NONE}
        for i, (each, earlier) in enumerate(zip(samples, torch.split(held, counts), strict=True)):
            after = digests[i][1]
            if after == NONE:
                continue
            if known[i][0] == after:  # this message has been decoded before
                made[i] = earlier
                continue
            self.memory.make_room(each.key, remembered)
            if self.memory.write(each.key, made[i]) != after:
                self._mismatch(samples)
        return torch.cat(made)

    def _mismatch(self, samples: Sequence[Rows]) -> NoReturn:
        for each in samples:
            self.memory.forget(each.key)
        raise MemoryMismatch(f"{len(samples)} samples are remembered differently at the ends of a line")

    def _parse(self, message: bytes, samples: Sequence[Rows]) -> tuple[list[tuple[bytes, bytes]], memoryview]:
        """Return the digests before and after of each sample, and the packet. Errors: PacketError."""
        start = HEAD.size + ENTRY.size * len(samples)
        if len(message) < start:
            raise PacketError(f"{len(message):,} bytes, activations of {len(samples)} samples have {start:,}")
        expected = (MAGIC, VERSION, self.bits, len(samples), self.memory.columns)
        if (met := HEAD.unpack_from(message)) != expected:
            raise PacketError(f"activations begin with {met}, expected {expected}")
        entries = list(ENTRY.iter_unpack(message[HEAD.size : start]))
        for each, (key, rows, _, _) in zip(samples, entries, strict=True):
            if (key, rows) != (each.key, each.count):
                raise PacketError(f"{rows} rows of {key:016x}, expected {each.count} of {each.key:016x}")
        if any(before != NONE == after for _, _, before, after in entries):
            raise PacketError("activations that are remembered no longer")
        remembered = [rows for _, rows, _, after in entries if after != NONE]
        if len(remembered) > self.memory.places or max(remembered, default=0) > self.memory.most_rows:
            raise PacketError("activations to be remembered beyond the size that both ends agreed on")
        return [(before, after) for _, _, before, after in entries], memoryview(message)[start:]


def reconstruct(before: torch.Tensor, packet: bytes | memoryview, bits: int) -> torch.Tensor:
    """Compute m' = m + C[a - m] as both ends do: (rows, columns) float32, rounded to bfloat16 unless exact.

    Errors: PacketError.
    """
    made = before + decode(packet, before.numel(), before.device).dense().view(before.shape)
    return made if bits == 32 else made.to(torch.bfloat16).float()


def encode_gradient(gradient: torch.Tensor, bits: int) -> bytes:
    """Encode a gradient of any shape in codes of so many bits. Errors: NonFiniteError."""
    cocktail = Cocktail(1.0, 1.0, bits, quant_bucket_size=GRADIENT_BUCKET if bits == 8 else BUCKET)
    return cocktail.encode(gradient.float().reshape(-1)).packet


def decode_gradient(packet: bytes, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Decode a gradient: `shape`, float32. Errors: PacketError."""
    return decode(packet, prod(shape), device).dense().view(*shape)
