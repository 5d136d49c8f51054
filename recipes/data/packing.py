"""From documents to samples of at most `max_length` tokens: cut, cut out of one long text, or packed so that
documents do not see each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from recipes.config import Data

from .samples import Sample
from .tokenization import TokenizedDocument


@dataclass(frozen=True)
class Dropped:
    """What of the documents is in no sample."""

    documents: int = 0  # how many there were
    cut: int = 0  # of them, cut to max_length
    longest: int = 0  # tokens of the longest
    tokens: int = 0  # cut off, or in samples that were left out
    samples: int = 0  # left out: they have no token to train on

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(
            self.documents + other.documents,
            self.cut + other.cut,
            max(self.longest, other.longest),
            self.tokens + other.tokens,
            self.samples + other.samples,
        )

    def warnings(self, longest: int, what: str = "") -> Iterator[str]:
        """In words, where there is something to tell. `longest`: max_length."""
        if self.cut:
            yield (
                f"{self.cut:,} {what}rows ({100 * self.cut / self.documents:.1f} %) longer than max_length "
                f"{longest} were cut (the longest has {self.longest:,} tokens)"
            )
        if self.samples:
            yield f"{self.samples:,} {what}samples have no token to train on and are left out"


NOTHING_DROPPED = Dropped()


@dataclass(frozen=True)
class PackedDocuments:
    """Samples, and what of the documents is not in them."""

    samples: list[Sample]
    lost: Dropped


def make_samples(documents: Sequence[TokenizedDocument], data: Data) -> PackedDocuments:
    """Documents as the recipe wants them; samples without a trained token are left out."""
    longest, documents = data.max_length, [d for d in documents if len(d.tokens)]
    lengths = [len(d.tokens) for d in documents]
    cut = sum(length > longest for length in lengths) if data.truncates else 0
    if not data.packing:
        made = [_sample(d.tokens[:longest], d.trained[:longest]) for d in documents]
    elif data.packing_strategy == "wrapped":
        made = _wrapped(documents, longest)
    else:
        made = _apart(documents, longest, data.packing_strategy)
    kept = [sample for sample in made if sample.count]
    lost = sum(lengths) - sum(len(sample.tokens) for sample in kept)
    return PackedDocuments(
        kept, Dropped(len(documents), cut, max(lengths, default=0), lost, len(made) - len(kept))
    )


def _wrapped(documents: Sequence[TokenizedDocument], length: int) -> list[Sample]:
    """One long text cut into blocks of `length`, as the reference implementation has it; documents see each
    other."""
    if not documents:
        return []
    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    starts = range(0, len(tokens), length)
    return [_sample(tokens[s : s + length], trained[s : s + length]) for s in starts if len(tokens) - s > 1]


def _apart(documents: Sequence[TokenizedDocument], length: int, strategy: str) -> list[Sample]:
    """Best fit decreasing, by TRL: documents longer than `length` are cut (bfd) or go on in another sample
    (bfd_split).

    TRL packs the places of the tokens in one long text, so that it need not know of tokens and masks.
    """
    if not documents:
        return []
    from datasets import Dataset
    from trl import pack_dataset

    from .sources import without_progress_bars

    tokens = np.concatenate([d.tokens for d in documents])
    trained = np.concatenate([d.trained for d in documents])
    ends = np.cumsum([len(d.tokens) for d in documents])
    places = np.split(np.arange(len(tokens)), ends[:-1])
    rows = Dataset.from_dict({"places": places})
    with without_progress_bars():
        packed = pack_dataset(
            rows, length, strategy, {"batch_size": len(rows), "load_from_cache_file": False}
        )
    made = []
    for row in packed.with_format("numpy"):
        sizes = tuple(row["seq_lengths"].tolist())
        made.append(_sample(tokens[row["places"]], trained[row["places"]], sizes if len(sizes) > 1 else ()))
    return made


def _sample(tokens: np.ndarray, trained: np.ndarray, documents: tuple[int, ...] = ()) -> Sample:
    """What begins a document is not trained: nothing predicts it."""
    trained = trained.copy()
    trained[np.cumsum((0, *documents[:-1]))] = False
    return Sample(tokens.astype(np.int32), trained, documents)
