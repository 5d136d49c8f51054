"""The corpus of a run: tokenized samples, and the order in which they are leased.

A `Sample` is a sequence of at most `max_length` token ids with a mask of the trained ones. The host tokenizes
once; peers receive the samples of a lease as bytes (`pack_samples`), and need neither the data set nor the
tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipes.config import Dataset, Recipe
from recipes.errors import DataError

from .packing import NOTHING_DROPPED, PackedDocuments, make_samples
from .sample_order import Mixture, shuffled_order
from .samples import Sample, SampleSource, samples_digest
from .sources import Row, no_rows, read_rows
from .stored_samples import MOST
from .streaming import ChunkIndex, StreamedCorpus
from .tokenization import RowTokenizer, TokenizedDocument, make_row_tokenizer, tokenize_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 1024  # rows tokenized at once
FEW = 20  # rows
Parts = list[list[TokenizedDocument]]  # the documents of each data set


@dataclass(frozen=True)
class Corpus(SampleSource):
    """Training and evaluation data of a run. Positions 0 .. len(corpus)-1 are its samples in the order they
    are leased; `sample_id` maps a position to a row.

    Without weights, epochs run over the rows of all data sets together. With weights, a position first draws
    a data set, and each data set has epochs of its own.
    """

    samples: tuple[Sample, ...]  # the rows of the training set
    held_out: tuple[Sample, ...]  # of the evaluation set; may be empty
    total: int  # positions of the run
    seed: int
    shuffle: bool
    mixture: Mixture | None = None
    sizes: tuple[int, ...] = ()  # rows of each data set of the mixture, one set after the other in `samples`
    found: tuple[str, ...] = ()  # summaries for people: "my.jsonl: 4,812 rows, prompt_completion"
    warnings: tuple[str, ...] = ()

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

    def costs(self, width: int) -> Callable[[int], float] | None:
        rows = [sample.cost(width) for sample in self.samples]
        return (lambda position: rows[self.sample_id(position)]) if min(rows) < max(rows) else None

    def digest(self) -> str:
        """sha256, hex, of every row, trained and held out: a resumed run must find the same data."""
        sizes = struct.pack("<3Q", len(self.samples), len(self.held_out), self.total)
        return samples_digest((*self.samples, *self.held_out), sizes)


_order = lru_cache(maxsize=16)(shuffled_order)  # leases move forward: older epochs come back rarely


def build_corpus(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    index: Path | None = None,
    progress: Callable[[str, int], None] = lambda path, rows: None,
) -> Corpus | StreamedCorpus:
    """Read, tokenize, split and pack the recipe's data: all of them, or their beginning where they are
    streamed. The tokenizer gets the chat template that was used.

    Args:
        index: file with the chunk index of a stream, for resuming without reading all again.
        progress: called with each data set's path and its number of tokenized rows.

    Errors: DataError where a row is broken or nothing is left to train on, HubUnreachable.
    """
    if recipe.data.streaming:
        return _stream(recipe, tokenizer, index)
    reader = _Reader(recipe, tokenizer, progress)
    documents = [reader.read(dataset) for dataset in recipe.datasets]
    for dataset, part in zip(recipe.datasets, documents, strict=True):
        reader.warnings += few_rows(dataset.path, len(part))
    held = [reader.read(dataset) for dataset in recipe.eval_datasets]
    if recipe.data.val_set_size:
        documents, held = _split(documents, recipe.data.val_set_size, recipe.training.seed)
    trained = [make_samples(part, recipe.data) for part in documents]
    measured = [make_samples(part, recipe.data) for part in held]
    warnings, max_length = reader.warnings, recipe.data.max_length
    warnings += sum((part.dropped for part in trained), NOTHING_DROPPED).warnings(max_length)
    warnings += sum((part.dropped for part in measured), NOTHING_DROPPED).warnings(max_length, "held-out ")
    samples = tuple(sample for part in trained for sample in part.samples)
    if not samples:
        raise DataError(
            "no sample has a token to train on: is everything masked, or cut away by data.max_length?"
        )
    corpus = Corpus(
        samples=samples,
        held_out=_held_out(recipe, measured),
        total=recipe.training.total_samples(len(samples)),
        seed=recipe.training.seed,
        shuffle=recipe.data.shuffle_dataset,
        mixture=_mixture(recipe),
        sizes=tuple(len(part.samples) for part in trained),
        found=tuple(reader.found),
        warnings=tuple(dict.fromkeys(warnings)),
    )
    return replace(corpus, found=(*corpus.found, *_shares(recipe, corpus))) if corpus.mixture else corpus


def few_rows(path: str, rows: int) -> list[str]:
    """Warn of a data set that a model learns by heart."""
    return [f"{path}: only {rows} rows: the model will learn them by heart"] if rows < FEW else []


def _stream(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, index: Path | None) -> StreamedCorpus:
    """Open a stream; the first `val_set_size` rows of each data set are held out."""
    data, skip = recipe.data, int(recipe.data.val_set_size)
    opened = [_open(dataset, recipe, tokenizer, streaming=True) for dataset in recipe.datasets]
    tokenizers = [each for each, _ in opened]
    held = [each.tokenize(list(islice(source, skip))) for each, source in opened]
    reader = _Reader(recipe, tokenizer)
    held += [reader.read(dataset) for dataset in recipe.eval_datasets]
    held_out = _held_out(recipe, [make_samples(part, data) for part in held])
    mixture = _mixture(recipe) or Mixture((1.0,), recipe.training.seed)
    total = recipe.training.total_samples(0)
    return StreamedCorpus(tokenizers, held_out, mixture, total, skip, ChunkIndex(index))


def _held_out(recipe: Recipe, measured: Sequence[PackedDocuments]) -> tuple[Sample, ...]:
    held_out = tuple(sample for part in measured for sample in part.samples)
    if recipe.has_eval and not held_out:
        raise DataError("no held-out sample has a token to measure")
    if len(held_out) > MOST:
        hint = "a smaller data.val_set_size, or max_samples of eval_datasets"
        raise DataError(f"{len(held_out):,} held-out samples, a run evaluates at most {MOST:,}", hint)
    return held_out


def _mixture(recipe: Recipe) -> Mixture | None:
    """The mixture of the data sets; None where they have no weights."""
    given = tuple(dataset.weight for dataset in recipe.datasets if dataset.weight is not None)
    return Mixture(given, recipe.training.seed) if given else None


def _shares(recipe: Recipe, corpus: Corpus) -> Iterator[str]:
    """Say how often the run passes over each data set. Errors: DataError where one has nothing to draw."""
    assert corpus.mixture is not None
    weights, drawn = corpus.mixture.weights, corpus.mixture.before(corpus.total)
    for dataset, weight, size, count in zip(recipe.datasets, weights, corpus.sizes, drawn, strict=True):
        if not size:
            raise DataError(f"{dataset.path}: no sample has a token to train on, and it has a weight")
        share = f"{100 * weight / sum(weights):.3g} % of the run"
        yield f"{dataset.path}: {size:,} samples, {share}, {count / size:.3g} times each"


@dataclass
class _Reader:
    """Reads whole data sets, and collects summaries and warnings for people."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    progress: Callable[[str, int], None] = lambda path, rows: None
    found: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def read(self, dataset: Dataset) -> list[TokenizedDocument]:
        tokenizer, source = _open(dataset, self.recipe, self.tokenizer)
        batches = iter(lambda: list(islice(source, BATCH)), [])
        documents: list[TokenizedDocument] = []
        for batch in tokenize_batches(tokenizer, batches, self.recipe.data.dataset_num_proc or 1):
            documents += batch
            self.progress(dataset.path, len(documents))
        guess = ", detected" if dataset.type == "auto" else ","
        self.found.append(
            f"{dataset.path}: {len(documents):,} rows{guess} {tokenizer.row_type}{tokenizer.unused_columns}"
        )
        self.warnings += tokenizer.warnings
        return documents


def _open(
    dataset: Dataset, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, streaming: bool = False
) -> tuple[RowTokenizer, Iterator[Row]]:
    """Detect the type of the rows by the first; returns their tokenizer, and all of them."""
    source = read_rows(dataset, streaming)
    first = next(source, None)
    if first is None:
        raise no_rows(dataset.path)
    rows = make_row_tokenizer(tokenizer, recipe.data, dataset, first, recipe.objective)
    return rows, chain([first], source)


def _split(parts: Parts, size: float, seed: int) -> tuple[Parts, Parts]:
    """Draw held-out rows by the seed; returns training and held-out rows. Errors: DataError."""
    total = sum(map(len, parts))
    count = max(1, round(size * total)) if size < 1 else int(size)
    if count >= total:
        raise DataError(
            f"data.val_set_size {size:g} holds out all of {total} rows", "a smaller data.val_set_size"
        )
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
    row_type: str
    packed: PackedDocuments
    warnings: tuple[str, ...]
    unused: tuple[str, ...] = ()  # columns that are not read
    sequences: tuple[str, ...] = ("",)  # names of a sample's sequences


def preview_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int = BATCH) -> list[Preview]:
    """Turn the first `count` rows of each data set into samples; no more of hub data is fetched.

    Errors: as `build_corpus`.
    """
    found = []
    for dataset in recipe.datasets:
        rows, source = _open(dataset, recipe, tokenizer, streaming=True)
        packed = make_samples(rows.tokenize(list(islice(source, count))), recipe.data)
        warnings = (*rows.warnings, *packed.dropped.warnings(recipe.data.max_length))
        seen = rows.row_type, packed, warnings, rows.unused, recipe.objective.sequences
        found.append(Preview(dataset.path, *seen))
    return found
