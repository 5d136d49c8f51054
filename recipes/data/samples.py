"""Samples: token ids with a mask of the trained ones and the lengths of their documents; as bytes, and as
batches.

A trained token is one term of the loss. The first token of a document has no context to be predicted from:
its `trained` is False in every sample, here and on the wire. Packed samples in a file are read when they are
asked for, so that a set of any length takes little memory:

    held_out = StoredSamples(open("eval", "rb"), limits)
    held_out[1::4]      every fourth, from 1 on; none of them is read yet
"""

from __future__ import annotations

import hashlib
import io
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, BinaryIO, overload

import numpy as np
import torch
from torch import Tensor

from recipes.config import Recipe
from recipes.errors import ForeignSamples

HEADER = struct.Struct("<4sBBI")  # magic, bytes of a token id, flags, samples
MAGIC = b"CKT1"
MASK, DOCUMENTS = 1, 2  # flags: sections that follow


@dataclass(frozen=True)
class SampleLimits:
    """The most that a sample of a run has, by its recipe; a hub's samples are compared with it."""

    tokens: int
    documents: int
    vocabulary: int = 1 << 31  # token ids are below it

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int | None) -> SampleLimits:
        tokens = recipe.data.max_length * (sequences := len(recipe.objective.sequences))
        documents = tokens if recipe.data.isolates_documents else sequences
        return cls(tokens, documents) if vocabulary is None else cls(tokens, documents, vocabulary)

    def packed(self, count: int) -> int:
        """Return the most bytes of `count` packed samples."""
        width = 2 if self.vocabulary <= 1 << 16 else 4
        fixed = 4 + 4 * self.documents + width * self.tokens
        return HEADER.size + count * fixed + (count * self.tokens + 7) // 8


UNBOUNDED = SampleLimits(tokens=1 << 62, documents=1 << 62)


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of one document, or of several that do not attend to each other."""

    tokens: np.ndarray  # (T,) int32, T >= 1
    trained: np.ndarray  # (T,) bool: loss mask; False for the first token of each document
    documents: tuple[int, ...] = ()  # their lengths, where there are several

    @property
    def count(self) -> int:
        """Trained tokens: terms of the loss."""
        return int(self.trained.sum())

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of its documents, one or several."""
        return self.documents or (len(self.tokens),)

    def cost(self, width: int) -> float:
        """Estimate its compute, in tokens through the linear layers of a model of hidden size `width`.

        Attention within a document of 6 width tokens takes as much as these layers: 12 layers x width^2
        parameters are multiplied with each token, 2 layers x width numbers with each pair of tokens.
        """
        return sum(length * (1 + length / (6 * width)) for length in self.lengths)


class SampleSource(ABC):
    """Samples that the hub leases by their positions, and held-out samples."""

    held_out: tuple[Sample, ...]

    @abstractmethod
    def sample(self, position: int) -> Sample: ...

    def tokens(self, positions: Sequence[int]) -> int:
        """Count the trained tokens at these positions."""
        return sum(self.sample(position).count for position in positions)

    def costs(self, width: int) -> Callable[[int], float] | None:
        """Return the cost of the sample at a position, for a model of this hidden size. None: all cost the
        same, or it is not known before a row is read."""
        return None

    def pack(self, positions: Sequence[int]) -> bytes:
        """Serialize the samples at these positions, for a peer."""
        return pack_samples([self.sample(position) for position in positions])

    def pack_held_out(self) -> bytes:
        return pack_samples(self.held_out)


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """Serialize samples, little endian.

    header | number of documents of each sample, uint32, unless each has one | length of each document, uint32
    | token ids, uint16 where the largest fits, else uint32 | mask, one bit a token, unless it is "all but the
    first of each document"
    """
    several = any(s.documents for s in samples)
    counts = np.array([len(s.lengths) for s in samples] if several else [], dtype="<u4")
    lengths = np.array([length for s in samples for length in s.lengths], dtype="<u4")
    tokens = np.concatenate([s.tokens for s in samples]) if samples else np.zeros(0, dtype=np.int32)
    width = 2 if not len(tokens) or tokens.max() < 1 << 16 else 4
    masked = any(s.count != len(s.tokens) - len(s.lengths) for s in samples)
    mask = np.packbits(np.concatenate([s.trained for s in samples]), bitorder="little") if masked else b""
    header = HEADER.pack(MAGIC, width, MASK * masked | DOCUMENTS * several, len(samples))
    parts = [header, counts.tobytes(), lengths.tobytes(), tokens.astype(f"<u{width}").tobytes(), bytes(mask)]
    return b"".join(parts)


def collate(samples: Sequence[Sample], pad: int = 0) -> dict[str, Tensor]:
    """Collate samples into a batch, padded on the right, each (B, T) int64: input_ids; labels, -100 where not
    trained; attention_mask, or position_ids where a sample has several documents.

    Transformers isolates documents where positions restart at each of them and there is no mask; with a mask,
    even of ones, they attend to each other. Padding needs none: attention is causal.
    """
    longest = max(len(s.tokens) for s in samples)
    shape = (len(samples), longest)
    input_ids = np.full(shape, pad, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.tokens)
        input_ids[row, :length] = sample.tokens
        attention_mask[row, :length] = 1
        position_ids[row] = np.concatenate([np.arange(n) for n in (*sample.lengths, longest - length)])
        labels[row, :length] = np.where(sample.trained, sample.tokens, -100)
    arrays: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
    if any(s.documents for s in samples):
        arrays["position_ids"] = position_ids
    else:
        arrays["attention_mask"] = attention_mask
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def batches(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """Yield batches of samples of like length, so that little of them is padding; the longest first, so that
    memory runs out early or not at all."""
    lengths = np.fromiter((len(sample.tokens) for sample in samples), np.int64, len(samples))
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), size):
        yield [samples[number] for number in order[start : start + size].tolist()]


def samples_digest(samples: Iterable[Sample], *more: bytes) -> str:
    """sha256, hex, of the samples' bytes, and of `more`."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(pack_samples([sample]))
    for part in more:
        digest.update(part)
    return digest.hexdigest()


# ---- samples in a file -------------------------------------------------------------------------------------

MOST = 1 << 20  # samples of an evaluation set: 17 MB of places
WINDOW = 1 << 16  # numbers that are read at once


class StoredSamples(Sequence[Sample]):
    """Samples of a file that `pack_samples` has written, all or some.

    Args:
        file: is read by one thread at a time.

    Errors: ForeignSamples, here and where a sample is read, for bytes that `pack_samples` does not write, or
    samples beyond the limits.
    """

    def __init__(self, file: BinaryIO, limits: SampleLimits) -> None:
        self._file, self._limits = file, limits
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise ForeignSamples(f"samples of {size} bytes, the header alone has {HEADER.size}")
        magic, width, flags, count = HEADER.unpack(head)
        if magic != MAGIC or width not in (2, 4) or flags & ~(MASK | DOCUMENTS):
            raise ForeignSamples("these bytes are no packed samples")
        several = bool(flags & DOCUMENTS)
        self._lengths_at = HEADER.size + 4 * count * several
        if count > MOST or self._lengths_at + 4 * count > size:
            raise ForeignSamples(f"{count:,} samples in {size:,} bytes, at most {MOST:,} are read")
        documents = np.arange(count + 1)  # before each sample, and all
        if several:
            documents[1:] = np.cumsum(np.concatenate([*numbers(file, count), np.empty(0, np.int64)]))
        self._tokens_at = self._lengths_at + 4 * int(documents[-1])
        if self._tokens_at > size:
            raise ForeignSamples(f"samples of {size} bytes, too short for {documents[-1]:,} lengths")
        tokens, before, total = np.zeros(count + 1, np.int64), 0, 0  # tokens before each sample, and all
        for lengths in numbers(file, int(documents[-1])):
            here = slice(*np.searchsorted(documents, (before + 1, before + len(lengths) + 1)))
            sums = np.cumsum(lengths)
            tokens[here] = total + sums[documents[here] - before - 1]
            before, total = before + len(lengths), total + int(sums[-1])
        if (longest := int(np.diff(tokens).max(initial=0))) > limits.tokens:
            raise ForeignSamples(f"a sample of {longest:,} tokens, this run has at most {limits.tokens:,}")
        end = self._tokens_at + width * total
        self._mask_at = end if flags & MASK else None  # None: all are trained but the first of each document
        if size != (wanted := end + ((total + 7) // 8 if flags & MASK else 0)):
            raise ForeignSamples(f"samples of {size} bytes, expected {wanted}")
        self._documents, self._tokens, self._width = documents, tokens, width
        self._numbers = range(count)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, which: int, /) -> Sample: ...
    @overload
    def __getitem__(self, which: slice, /) -> StoredSamples: ...
    def __getitem__(self, which: int | slice, /) -> Sample | StoredSamples:
        if isinstance(which, int):
            return self._read(self._numbers[which])
        some = copy(self)
        some._numbers = self._numbers[which]
        return some

    def __iter__(self) -> Iterator[Sample]:
        return map(self._read, self._numbers)

    def _read(self, number: int) -> Sample:
        start, stop = (int(at) for at in self._tokens[number : number + 2])
        first, last = (int(at) for at in self._documents[number : number + 2])
        lengths = np.frombuffer(self._bytes(self._lengths_at, 4, first, last), "<u4").astype(np.int64)
        raw, limit = self._bytes(self._tokens_at, self._width, start, stop), self._limits.vocabulary
        tokens = np.frombuffer(raw, f"<u{self._width}").astype(np.int64)
        if tokens.max() >= limit:
            raise ForeignSamples(f"token {tokens.max()} in a vocabulary of {limit}")
        firsts, trained = np.cumsum(lengths) - lengths, np.ones(stop - start, dtype=bool)
        if self._mask_at is not None:
            bits = np.frombuffer(self._bytes(self._mask_at, 1, start // 8, -(-stop // 8)), np.uint8)
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


def unpack_samples(data: bytes, limits: SampleLimits = UNBOUNDED) -> list[Sample]:
    """Deserialize samples that came from a socket. Raises ForeignSamples as `StoredSamples` does."""
    return list(StoredSamples(io.BytesIO(data), limits))
