"""The corpus of a run: rows of tokens, which of them are trained, and in which order they are seen.

A *sample* (recipes.samples) is a sequence of at most `max_length` token ids with a mask of those that are
trained. The owner tokenizes once; peers get the samples of a lease as bytes (`pack`), and need neither the
data set nor the tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipes.config import Data, Dataset, Recipe
from recipes.errors import DataError

from .packing import NOTHING_DROPPED, Dropped, PackedDocuments, make_samples
from .sample_order import Mixture, shuffled_order
from .samples import Sample, SampleSource, batches, collate, pack_samples, samples_digest, unpack_samples
from .sources import Row, read_rows
from .streaming import ChunkIndex, StreamedCorpus
from .tokenization import RowTokenizer, TokenizedDocument, detect_row_type, tokenize_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Corpus",
    "Sample",
    "batches",
    "build_corpus",
    "collate",
    "pack_samples",
    "shuffled_order",
    "unpack_samples",
]

_BATCH = 1024  # rows tokenized at once
Parts = list[list[TokenizedDocument]]  # the documents of each data set


@dataclass(frozen=True)
class Corpus(SampleSource):
    """What a run is trained and measured on. Positions 0 .. len(corpus)-1 are the samples of the run in the
    order they are leased; `sample_id` says which row each is.

    Without weights the rows of all data sets are gone through together, epoch after epoch. With weights a
    position first draws a data set, and each data set is gone through in epochs of its own.
    """

    samples: tuple[Sample, ...]  # the rows of the training set
    held_out: tuple[Sample, ...]  # of the evaluation set; may be empty
    total: int  # positions of the run
    seed: int
    shuffle: bool
    mixture: Mixture | None = None
    sizes: tuple[int, ...] = ()  # rows of each data set of the mixture, one set after the other in `samples`
    found: tuple[str, ...] = ()  # what was read, for people: "my.jsonl: 4,812 rows, prompt_completion"
    warnings: tuple[str, ...] = ()
    lost: Dropped = NOTHING_DROPPED  # what of the training set is in no sample

    def __len__(self) -> int:
        return self.total

    def sample_id(self, position: int) -> int:
        """The row at `position` of the run."""
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} of a run of {self.total} samples")
        if self.mixture is None:
            epoch, place = divmod(position, len(self.samples))
            return int(_order(len(self.samples), self.seed, epoch, self.shuffle)[place])
        draw = self.mixture.draw(position)
        size = self.sizes[draw.part]
        epoch, place = divmod(draw.place, size)
        order = _order(size, self.seed, epoch, self.shuffle, draw.part + 1)
        return sum(self.sizes[: draw.part]) + int(order[place])

    def sample(self, position: int) -> Sample:
        return self.samples[self.sample_id(position)]

    def digest(self) -> str:
        """sha256, hex, of every row, trained and held out: is it still the same data?"""
        sizes = struct.pack("<3Q", len(self.samples), len(self.held_out), self.total)
        return samples_digest((*self.samples, *self.held_out), sizes)


_order = lru_cache(maxsize=16)(shuffled_order)  # leases move forward: older epochs come back rarely


def build_corpus(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    index: Path | None = None,
    told: Callable[[str, int], None] = lambda path, rows: None,
) -> Corpus | StreamedCorpus:
    """Read, tokenize, split and pack the recipe's data: all of them, or their beginning where they are
    streamed. The tokenizer gets the chat template that was used.

    Args:
        index: file where a stream keeps what lets a run go on without reading all again.
        told: hears of each data set how many of its rows are tokenized.

    Errors: DataError where a row is broken or nothing is left to train on, HubUnreachable.
    """
    if recipe.data.streaming:
        return _streamed(recipe, tokenizer, index)
    found: list[str] = []
    warnings: list[str] = []
    documents = _documents(recipe.datasets, recipe.data, tokenizer, found, warnings, told)
    held = _documents(recipe.eval_datasets, recipe.data, tokenizer, found, warnings, told)
    if recipe.data.val_set_size:
        documents, held = _split(documents, recipe.data.val_set_size, recipe.training.seed)
    made = [make_samples(part, recipe.data) for part in documents]
    measured = [make_samples(part, recipe.data) for part in held]
    lost = sum((part.lost for part in made), NOTHING_DROPPED)
    warnings += lost.warnings(recipe.data.max_length)
    warnings += sum((part.lost for part in measured), NOTHING_DROPPED).warnings(
        recipe.data.max_length, "held-out "
    )
    samples = tuple(sample for part in made for sample in part.samples)
    held_out = tuple(sample for part in measured for sample in part.samples)
    if not samples:
        raise DataError(
            "no sample has a token to train on: is everything masked, or cut away by data.max_length?"
        )
    if recipe.has_eval and not held_out:
        raise DataError("no held-out sample has a token to measure")
    corpus = Corpus(
        samples=samples,
        held_out=held_out,
        total=recipe.training.total_samples(len(samples)),
        seed=recipe.training.seed,
        shuffle=recipe.data.shuffle_dataset,
        mixture=mixture_of(recipe),
        sizes=tuple(len(part.samples) for part in made),
        found=tuple(found),
        warnings=tuple(dict.fromkeys(warnings)),
        lost=lost,
    )
    return replace(corpus, found=(*found, *_shares(recipe, corpus))) if corpus.mixture else corpus


def _streamed(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, index: Path | None) -> StreamedCorpus:
    """The first `val_set_size` rows of each data set are held out."""
    data, skip = recipe.data, int(recipe.data.val_set_size)
    opened = [_opened(dataset, data, tokenizer, streaming=True) for dataset in recipe.datasets]
    encoders = [encoder for encoder, _ in opened]
    held = [encoder.encode(list(islice(source, skip))) for encoder, source in opened]
    held += _documents(recipe.eval_datasets, data, tokenizer, [], [])
    held_out = tuple(sample for part in held for sample in make_samples(part, data).samples)
    if recipe.has_eval and not held_out:
        raise DataError("no held-out sample has a token to measure")
    mixture = mixture_of(recipe) or Mixture((1.0,), recipe.training.seed)
    total = recipe.training.total_samples(0)
    return StreamedCorpus(encoders, held_out, mixture, total, skip, ChunkIndex(index))


def mixture_of(recipe: Recipe) -> Mixture | None:
    """None where the data sets have no weights."""
    weights = [dataset.weight for dataset in recipe.datasets]
    given = tuple(weight for weight in weights if weight is not None)
    return Mixture(given, recipe.training.seed) if given else None


def _shares(recipe: Recipe, corpus: Corpus) -> Iterator[str]:
    """How often the run goes through each data set. Errors: DataError where one has nothing to draw."""
    assert corpus.mixture is not None
    weights, drawn = corpus.mixture.weights, corpus.mixture.before(corpus.total)
    for dataset, weight, size, count in zip(recipe.datasets, weights, corpus.sizes, drawn, strict=True):
        if not size:
            raise DataError(f"{dataset.path}: no sample has a token to train on, and it has a weight")
        share = f"{100 * weight / sum(weights):.3g} % of the run"
        yield f"{dataset.path}: {size:,} samples, {share}, {count / size:.3g} times each"


def _documents(
    datasets: Sequence[Dataset],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    found: list[str],
    warnings: list[str],
    told: Callable[[str, int], None] = lambda path, rows: None,
) -> Parts:
    return [_documents_of(dataset, data, tokenizer, found, warnings, told) for dataset in datasets]


def _documents_of(
    dataset: Dataset,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    found: list[str],
    warnings: list[str],
    told: Callable[[str, int], None],
) -> list[TokenizedDocument]:
    encoder, source = _opened(dataset, data, tokenizer)
    batches = iter(lambda: list(islice(source, _BATCH)), [])
    documents: list[TokenizedDocument] = []
    for batch in tokenize_batches(encoder, batches, data.dataset_num_proc or 1):
        documents += batch
        told(dataset.path, len(documents))
    guess = ", detected" if dataset.type == "auto" else ","
    found.append(f"{dataset.path}: {len(documents):,} rows{guess} {encoder.kind}")
    warnings += encoder.warnings
    return documents


def _opened(
    dataset: Dataset, data: Data, tokenizer: PreTrainedTokenizerBase, streaming: bool = False
) -> tuple[RowTokenizer, Iterator[Row]]:
    """What the rows are, by the first, and all of them."""
    source = read_rows(dataset, streaming)
    first = next(source, None)
    if first is None:
        raise DataError(f"{dataset.path}: the data set is empty")
    return RowTokenizer(tokenizer, data, dataset, detect_row_type(dataset, first)), chain([first], source)


def _split(parts: Parts, size: float, seed: int) -> tuple[Parts, Parts]:
    """(training, held out), each by data set: rows drawn by the seed. Errors: DataError where none is left
    for either."""
    total = sum(map(len, parts))
    count = max(1, round(size * total)) if size < 1 else int(size)
    if count >= total:
        raise DataError(f"data.val_set_size {size:g} holds out all of {total} rows")
    chosen = np.zeros(total, dtype=bool)
    chosen[shuffled_order(total, seed, 1 << 32)[:count]] = True  # an epoch that no run reaches
    kept, held = [], []
    for part, start in zip(parts, accumulate(map(len, parts), initial=0), strict=False):
        out = chosen[start : start + len(part)]
        kept.append([d for d, is_out in zip(part, out, strict=True) if not is_out])
        held.append([d for d, is_out in zip(part, out, strict=True) if is_out])
    return kept, held


@dataclass(frozen=True)
class Preview:
    """The first rows of a data set, as samples."""

    path: str
    kind: str
    packed: PackedDocuments
    warnings: tuple[str, ...]


def preview_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int = _BATCH) -> list[Preview]:
    """What the first `count` rows of each data set become; of data on the hub no more is fetched.

    Errors: as of `build_corpus`.
    """
    found = []
    for dataset in recipe.datasets:
        encoder, source = _opened(dataset, recipe.data, tokenizer, streaming=True)
        packed = make_samples(encoder.encode(list(islice(source, count))), recipe.data)
        warnings = (*encoder.warnings, *packed.lost.warnings(recipe.data.max_length))
        found.append(Preview(dataset.path, encoder.kind, packed, warnings))
    return found
