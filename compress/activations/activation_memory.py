"""Memory of one end of a line: of each sample the activations last reconstructed, in bfloat16.

A memory has a fixed number of places, on disk or in host memory. When they are taken, further samples are not
remembered: samples come again once an epoch, so that giving a place to a newer one would lose both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

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

    def __len__(self) -> int:
        return len(self._held)

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
