"""The corpus of a run: rows of tokens, which of them are trained, and in which order they are seen.

A *sample* is a sequence of at most `max_length` token ids with a mask of those that are trained. The owner
tokenizes once; peers get the samples of a lease as bytes (`pack`), and need neither the data set nor the
tokenizer.

A trained token is one that is predicted, so one term of the loss. The first token of a sample is predicted by
nothing and never counts: `trained[0]` is False in every sample, here and on the wire.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from recipes.encode import Encoded, Encoder, detect
from recipes.problems import DataError
from recipes.schema import Data, Dataset, Recipe
from recipes.sources import rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADER = struct.Struct("<4sBBI")  # magic, bytes of a token id, mask follows, samples
MAGIC = b"CKT1"
_BATCH = 1024  # rows tokenized at once


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence."""

    tokens: np.ndarray  # (T,) int32, T >= 2
    trained: np.ndarray  # (T,) bool: is this token predicted? [0] is False

    @property
    def count(self) -> int:
        """Trained tokens: terms of the loss."""
        return int(self.trained.sum())


@dataclass(frozen=True)
class Corpus:
    """What a run is trained and measured on. Positions 0 .. len(corpus)-1 are the samples of the run in the
    order they are leased, epoch after epoch; `sample_id` says which row each is."""

    samples: tuple[Sample, ...]  # the rows of the training set
    held_out: tuple[Sample, ...]  # of the evaluation set; may be empty
    total: int  # positions of the run
    seed: int
    shuffle: bool
    found: tuple[str, ...] = ()  # what was read, for people: "my.jsonl: 4,812 rows, prompt_completion"
    warnings: tuple[str, ...] = ()
    _orders: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return self.total

    def sample_id(self, position: int) -> int:
        """The row at `position` of the run; each epoch has its own order."""
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} of a run of {self.total} samples")
        epoch, place = divmod(position, len(self.samples))
        return int(self._order(epoch)[place])

    def sample(self, position: int) -> Sample:
        return self.samples[self.sample_id(position)]

    def tokens(self, positions: Sequence[int]) -> int:
        """Trained tokens of these positions."""
        return sum(self.sample(position).count for position in positions)

    def pack(self, positions: Sequence[int]) -> bytes:
        """These positions' samples as bytes, for a peer; `unpack` reads them."""
        return pack([self.sample(position) for position in positions])

    def pack_held_out(self) -> bytes:
        return pack(self.held_out)

    def digest(self) -> str:
        """sha256, hex, of every row, trained and held out: is it still the same data?"""
        digest = hashlib.sha256()
        for row in (*self.samples, *self.held_out):
            digest.update(pack([row]))
        digest.update(struct.pack("<3Q", len(self.samples), len(self.held_out), self.total))
        return digest.hexdigest()

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            while len(self._orders) > 2:  # leases move forward: older epochs come back rarely
                self._orders.pop(min(self._orders))
            self._orders[epoch] = shuffled(len(self.samples), self.seed, epoch, self.shuffle)
        return self._orders[epoch]


def shuffled(count: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """(count,) int64, a permutation that depends on seed and epoch only.

    Ranks of a raw PCG64 stream, which NumPy keeps stable over its versions (the permutation of a Generator is
    not): a run must find its order again after an upgrade.
    """
    if not shuffle:
        return np.arange(count)
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(count), kind="stable")


def build_corpus(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Read, tokenize, split and pack the recipe's data. The tokenizer gets the chat template that was used.

    Errors: DataError where a row is broken or nothing is left to train on, HubUnreachable.
    """
    found: list[str] = []
    warnings: list[str] = []
    documents = _documents(recipe.datasets, recipe.data, tokenizer, found, warnings)
    held = _documents(recipe.eval_datasets, recipe.data, tokenizer, found, warnings)
    if recipe.data.val_set_size:
        documents, held = _split(documents, recipe.data.val_set_size, recipe.training.seed)
    samples = _samples(documents, recipe.data, "", warnings)
    held_out = _samples(held, recipe.data, "held-out ", warnings)
    if not samples:
        raise DataError(
            "no sample has a token to train on: is everything masked, or cut away by data.max_length?"
        )
    if recipe.has_eval and not held_out:
        raise DataError("no held-out sample has a token to measure")
    return Corpus(
        samples=tuple(samples),
        held_out=tuple(held_out),
        total=recipe.training.total_samples(len(samples)),
        seed=recipe.training.seed,
        shuffle=recipe.data.shuffle_dataset,
        found=tuple(found),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _documents(
    datasets: Sequence[Dataset],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    found: list[str],
    warnings: list[str],
) -> list[Encoded]:
    documents: list[Encoded] = []
    for dataset in datasets:
        source = rows(dataset)
        first = next(source, None)
        if first is None:
            raise DataError(f"{dataset.path}: the data set is empty")
        encoder = Encoder(tokenizer, data, dataset, detect(dataset, first))
        before = len(documents)
        batch = [first]
        while batch:
            documents += encoder.encode(batch)
            batch = list(islice(source, _BATCH))
        guess = ", detected" if dataset.type == "auto" else ","
        found.append(f"{dataset.path}: {len(documents) - before:,} rows{guess} {encoder.kind}")
        warnings += encoder.warnings
    return documents


def _split(documents: list[Encoded], size: float, seed: int) -> tuple[list[Encoded], list[Encoded]]:
    """(training, held out): rows drawn by the seed. Errors: DataError where none is left for either."""
    count = max(1, round(size * len(documents))) if size < 1 else int(size)
    if count >= len(documents):
        raise DataError(f"data.val_set_size {size:g} holds out all of {len(documents)} rows")
    chosen = set(shuffled(len(documents), seed, 1 << 32).tolist()[:count])  # an epoch that no run reaches
    kept = [d for i, d in enumerate(documents) if i not in chosen]
    return kept, [documents[i] for i in sorted(chosen)]


def _samples(documents: list[Encoded], data: Data, what: str, warnings: list[str]) -> list[Sample]:
    """Documents cut, or packed, to `max_length`; those without a trained token are left out and counted."""
    longest = data.max_length
    if data.packing and documents:
        pieces = _wrapped(documents, longest)
    else:
        pieces = [Encoded(d.tokens[:longest], d.trained[:longest]) for d in documents]
        cut = sum(len(d.tokens) > longest for d in documents)
        if cut:
            share = 100 * cut / len(documents)
            warnings.append(
                f"{cut:,} {what}rows ({share:.1f} %) longer than max_length {longest} were cut "
                f"(the longest has {max(len(d.tokens) for d in documents):,} tokens)"
            )
    samples = [_sample(piece) for piece in pieces]
    kept = [sample for sample in samples if sample.count]
    if len(kept) < len(samples):
        warnings.append(
            f"{len(samples) - len(kept):,} {what}samples have no token to train on and are left out"
        )
    return kept


def _wrapped(documents: list[Encoded], length: int) -> list[Encoded]:
    """One long text cut into blocks of `length`, as the reference implementation has it; documents see each
    other."""
    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    starts = range(0, len(tokens), length)
    return [Encoded(tokens[s : s + length], trained[s : s + length]) for s in starts if len(tokens) - s > 1]


def _sample(piece: Encoded) -> Sample:
    trained = piece.trained.copy()
    trained[:1] = False
    return Sample(piece.tokens.astype(np.int32), trained)


def pack(samples: Sequence[Sample]) -> bytes:
    """Samples as bytes, little endian: header; length of each, uint32; token ids of all, uint16 where the
    largest fits and uint32 where not; the mask of all, one bit each, left out where it is "all but the
    first"."""
    lengths = np.array([len(s.tokens) for s in samples], dtype="<u4")
    tokens = np.concatenate([s.tokens for s in samples]) if samples else np.zeros(0, dtype=np.int32)
    width = 2 if not len(tokens) or tokens.max() < 1 << 16 else 4
    masked = any(s.count != len(s.tokens) - 1 for s in samples)
    mask = np.packbits(np.concatenate([s.trained for s in samples]), bitorder="little") if masked else b""
    header = HEADER.pack(MAGIC, width, masked, len(samples))
    return b"".join([header, lengths.tobytes(), tokens.astype(f"<u{width}").tobytes(), bytes(mask)])


def unpack(data: bytes, vocabulary: int | None = None) -> list[Sample]:
    """`pack` backwards. Comes from a socket, so everything is checked.

    Errors: DataError for anything that `pack` does not write, or a token outside `vocabulary`.
    """
    if len(data) < HEADER.size:
        raise DataError(f"samples of {len(data)} bytes, the header alone has {HEADER.size}")
    magic, width, masked, count = HEADER.unpack_from(data)
    if magic != MAGIC or width not in (2, 4) or masked not in (0, 1):
        raise DataError("these bytes are no packed samples")
    body = memoryview(data)[HEADER.size :]
    if len(body) < 4 * count:
        raise DataError(f"samples of {len(data)} bytes, too short for {count} lengths")
    lengths = np.frombuffer(body[: 4 * count], dtype="<u4").astype(np.int64)
    total = int(lengths.sum())
    wanted = 4 * count + width * total + ((total + 7) // 8 if masked else 0)
    if len(body) != wanted or (count and lengths.min() < 1):
        raise DataError(f"samples of {len(data)} bytes, expected {HEADER.size + wanted}")
    ends = np.cumsum(lengths)
    tokens = np.frombuffer(body[4 * count : 4 * count + width * total], dtype=f"<u{width}").astype(np.int64)
    limit = vocabulary if vocabulary is not None else 1 << 31
    if total and tokens.max() >= limit:
        raise DataError(f"token {tokens.max()} in a vocabulary of {limit}")
    trained = np.ones(total, dtype=bool)
    if masked:
        bits = np.frombuffer(body[4 * count + width * total :], dtype=np.uint8)
        trained = np.unpackbits(bits, count=total, bitorder="little").astype(bool)
    elif count:
        trained[ends - lengths] = False
    if count and trained[ends - lengths].any():
        raise DataError("the first token of a sample cannot be trained: nothing predicts it")
    parts = zip(np.split(tokens.astype(np.int32), ends[:-1]), np.split(trained, ends[:-1]), strict=True)
    return [Sample(t, m) for t, m in parts] if count else []


def collate(samples: Sequence[Sample], pad: int = 0) -> dict[str, Tensor]:
    """Samples as a batch, padded on the right: input_ids, attention_mask, labels, each (B, T) int64; labels
    are -100 where nothing is trained."""
    longest = max(len(s.tokens) for s in samples)
    shape = (len(samples), longest)
    input_ids = np.full(shape, pad, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, -100, dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample.tokens)
        input_ids[row, :length] = sample.tokens
        attention_mask[row, :length] = 1
        labels[row, :length] = np.where(sample.trained, sample.tokens, -100)
    arrays: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def batches(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    for start in range(0, len(samples), size):
        yield samples[start : start + size]
