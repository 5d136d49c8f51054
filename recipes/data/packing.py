"""Turn documents into samples of at most `max_length` tokens: truncated, wrapped, or packed in isolation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from recipes.config import Data

from .samples import Sample
from .tokenization import TokenizedDocument


@dataclass(frozen=True)
class Dropped:
    """Tokens of the documents that are in no sample."""

    documents: int = 0  # in all
    truncated: int = 0  # of them, cut to max_length
    longest: int = 0  # tokens of the longest
    tokens: int = 0  # cut off, or in samples that were left out
    samples: int = 0  # left out for want of a trained token

    def __add__(self, other: Dropped) -> Dropped:
        summed = Dropped(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))
        longest = max(self.longest, other.longest)
        return Dropped(summed.documents, summed.truncated, longest, summed.tokens, summed.samples)

    def warnings(self, max_length: int, what: str = "") -> Iterator[str]:
        """Yield warnings for the user; `what`: kind of rows, with a space after it."""
        if self.truncated:
            share = 100 * self.truncated / self.documents
            yield (
                f"{self.truncated:,} {what}rows ({share:.1f} %) longer than max_length {max_length} were cut "
                f"(the longest has {self.longest:,} tokens)"
            )
        if self.samples:
            yield f"{self.samples:,} {what}samples have no token to train on and are left out"


NOTHING_DROPPED = Dropped()


@dataclass(frozen=True)
class PackedDocuments:
    """Samples, and what was dropped of their documents."""

    samples: list[Sample]
    dropped: Dropped


def make_samples(documents: Sequence[TokenizedDocument], data: Data) -> PackedDocuments:
    """Truncate or pack documents as the recipe says; samples without a trained token are left out."""
    max_length, documents = data.max_length, [d for d in documents if len(d.tokens)]
    lengths = [len(d.tokens) for d in documents]
    truncated = sum(d.longest > max_length for d in documents) if data.truncates else 0
    if not data.packing:
        cut = [d.cut(max_length) for d in documents]
        made = [_sample(d.tokens, d.trained & d.teaches, d.sequences) for d in cut]
    elif not documents:
        made = []
    elif data.packing_strategy == "wrapped":
        made = _wrap(documents, max_length)
    else:
        made = _pack(documents, max_length, data.packing_strategy)
    kept = [sample for sample in made if sample.count]
    tokens = sum(lengths) - sum(len(sample.tokens) for sample in kept)
    longest = max((d.longest for d in documents), default=0)
    return PackedDocuments(kept, Dropped(len(documents), truncated, longest, tokens, len(made) - len(kept)))


def _wrap(documents: Sequence[TokenizedDocument], length: int) -> list[Sample]:
    """Cut the concatenated documents into blocks of `length`, as the reference implementation does; documents
    attend to each other."""
    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    starts = range(0, len(tokens), length)
    return [_sample(tokens[s : s + length], trained[s : s + length]) for s in starts if len(tokens) - s > 1]


def _pack(documents: Sequence[TokenizedDocument], length: int, strategy: str) -> list[Sample]:
    """Pack by TRL's best fit decreasing: documents longer than `length` are truncated (bfd) or continue in
    another sample (bfd_split).

    TRL packs positions in the concatenated text, so it needs to know nothing of tokens and masks.
    """
    from datasets import Dataset
    from trl import pack_dataset

    from .sources import without_progress_bars

    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    ends = np.cumsum([len(d.tokens) for d in documents])
    places = np.split(np.arange(len(tokens)), ends[:-1])
    rows = Dataset.from_dict({"places": places})
    options = {"batch_size": len(rows), "load_from_cache_file": False}
    with without_progress_bars():
        packed = pack_dataset(rows, length, strategy, options)
    made = []
    for row in packed.with_format("numpy"):
        sizes = tuple(row["seq_lengths"].tolist())
        made.append(_sample(tokens[row["places"]], trained[row["places"]], sizes if len(sizes) > 1 else ()))
    return made


def _sample(tokens: np.ndarray, trained: np.ndarray, documents: tuple[int, ...] = ()) -> Sample:
    """Make a sample; the first token of each document is not trained: nothing predicts it."""
    trained = trained.copy()
    trained[np.cumsum((0, *documents[:-1]))] = False
    return Sample(tokens.astype(np.int32), trained, documents)
