"""Packed samples in a file, each read when it is asked for: a set of any length takes little memory.

    held_out = StoredSamples(open("eval", "rb"), limits)
    held_out[1::4]      every fourth, from 1 on; none of them is read yet

What they are is what `unpack_samples` gives of the same bytes, and is checked as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, overload

import numpy as np

from recipes.errors import ForeignSamples

from .samples import DOCUMENTS, HEADER, MAGIC, MASK, Sample, SampleLimits

MOST = 1 << 20  # samples of an evaluation set: 17 MB of places
WINDOW = 1 << 16  # numbers that are read at once


@dataclass(frozen=True)
class SamplePlaces:
    """The places at which the samples of a file begin and end."""

    documents: np.ndarray  # (samples + 1,) int64: documents before each, and all
    tokens: np.ndarray  # (samples + 1,) int64: tokens before each, and all
    width: int  # bytes of a token
    lengths_at: int  # byte at which the lengths of documents begin
    tokens_at: int
    mask_at: int | None  # None: every token is trained but the first of each document

    @classmethod
    def read(cls, file: BinaryIO, limits: SampleLimits) -> SamplePlaces:
        """Read the lengths, a window at a time. Errors: ForeignSamples."""
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise ForeignSamples(f"samples of {size} bytes, the header alone has {HEADER.size}")
        magic, width, flags, count = HEADER.unpack(head)
        if magic != MAGIC or width not in (2, 4) or flags & ~(MASK | DOCUMENTS):
            raise ForeignSamples("these bytes are no packed samples")
        several = bool(flags & DOCUMENTS)
        lengths_at = HEADER.size + 4 * count * several
        if count > MOST or lengths_at + 4 * count > size:
            raise ForeignSamples(f"{count:,} samples in {size:,} bytes, at most {MOST:,} are evaluated")
        documents = np.arange(count + 1)
        if several:
            documents[1:] = np.cumsum(np.concatenate([*numbers(file, count), np.empty(0, np.int64)]))
        tokens_at = lengths_at + 4 * int(documents[-1])
        if tokens_at > size:
            raise ForeignSamples(f"samples of {size} bytes, too short for {documents[-1]:,} lengths")
        tokens, before, total = np.zeros(count + 1, np.int64), 0, 0
        for lengths in numbers(file, int(documents[-1])):
            here = slice(*np.searchsorted(documents, (before + 1, before + len(lengths) + 1)))
            sums = np.cumsum(lengths)
            tokens[here] = total + sums[documents[here] - before - 1]
            before, total = before + len(lengths), total + int(sums[-1])
        if (longest := int(np.diff(tokens).max(initial=0))) > limits.tokens:
            raise ForeignSamples(f"a sample of {longest:,} tokens, this run has at most {limits.tokens:,}")
        mask_at = tokens_at + width * total if flags & MASK else None
        wanted = tokens_at + width * total + ((total + 7) // 8 if flags & MASK else 0)
        if size != wanted:
            raise ForeignSamples(f"samples of {size} bytes, expected {wanted}")
        return cls(documents, tokens, width, lengths_at, tokens_at, mask_at)


class StoredSamples(Sequence[Sample]):
    """Samples of a file that `pack_samples` has written, all or some.

    Args:
        file: is read by one thread at a time.
        numbers: of the samples; None: all.

    Errors: ForeignSamples, here and where a sample is read, for bytes that `pack_samples` does not write, or
    samples beyond the limits.
    """

    def __init__(
        self,
        file: BinaryIO,
        limits: SampleLimits,
        places: SamplePlaces | None = None,
        numbers: range | None = None,
    ) -> None:
        self._file, self._limits = file, limits
        self._places = places = places or SamplePlaces.read(file, limits)
        self._numbers = range(len(places.tokens) - 1) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, which: int, /) -> Sample: ...
    @overload
    def __getitem__(self, which: slice, /) -> StoredSamples: ...
    def __getitem__(self, which: int | slice, /) -> Sample | StoredSamples:
        if isinstance(which, slice):
            return StoredSamples(self._file, self._limits, self._places, self._numbers[which])
        return self._read(self._numbers[which])

    def __iter__(self) -> Iterator[Sample]:
        return map(self._read, self._numbers)

    def _read(self, number: int) -> Sample:
        places, limit = self._places, self._limits.vocabulary
        start, stop = (int(at) for at in places.tokens[number : number + 2])
        first, last = (int(at) for at in places.documents[number : number + 2])
        lengths = np.frombuffer(self._bytes(places.lengths_at, 4, first, last), "<u4").astype(np.int64)
        tokens = np.frombuffer(
            self._bytes(places.tokens_at, places.width, start, stop), f"<u{places.width}"
        ).astype(np.int64)
        if tokens.max() >= limit:
            raise ForeignSamples(f"token {tokens.max()} in a vocabulary of {limit}")
        firsts, trained = np.cumsum(lengths) - lengths, np.ones(stop - start, dtype=bool)
        if places.mask_at is not None:
            bits = np.frombuffer(self._bytes(places.mask_at, 1, start // 8, -(-stop // 8)), np.uint8)
            trained = np.unpackbits(bits, bitorder="little")[start % 8 :][: stop - start].astype(bool)
            if trained[firsts].any():
                raise ForeignSamples("the first token of a document cannot be trained: nothing predicts it")
        trained[firsts] = False
        owns = tuple(lengths.tolist()) if len(lengths) > 1 else ()
        return Sample(tokens.astype(np.int32), trained, owns)

    def _bytes(self, at: int, width: int, start: int, stop: int) -> bytes:
        self._file.seek(at + width * start)
        return self._file.read(width * (stop - start))


def numbers(file: BinaryIO, count: int) -> Iterator[np.ndarray]:
    """Read `count` positive uint32, a window at a time: (n,) int64 each. Errors: ForeignSamples."""
    for start in range(0, count, WINDOW):
        some = np.frombuffer(file.read(4 * min(WINDOW, count - start)), "<u4").astype(np.int64)
        if some.min() < 1:
            raise ForeignSamples("a sample of no tokens among packed samples")
        yield some
