"""The corpus of a run: tokenized samples, and the order in which they are leased.

A `Sample` is a sequence of at most `max_length` token ids with a mask of the trained ones. The host tokenizes
once; peers receive the samples of a lease as bytes (`pack_samples`), and need neither the data set nor the
tokenizer. A position is all the state that the order has, in shuffled epochs and in weighted mixtures of data
sets: the sample at position 1,000,000 is known without those before it, so a resumed run needs no cursor.

Of a corpus too large for memory, rows are read, tokenized and packed when their positions are asked for. Each
data set is read in chunks of rows, one after the other, and again from its beginning at its end. A chunk is
packed and shuffled by itself, so the chunk is all the state there is. An index on disk has the number of rows
and samples before each chunk and the hash of its samples. A resumed run skips the rows before, and a chunk
that is read again must have the same hash. Without the index everything is tokenized again, with the same
result. A few chunks are cached, for the leases in progress; the next one is made ahead, in a thread.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from threading import RLock

import numpy as np
from transformers import PreTrainedTokenizerBase

from recipes.config import Dataset, Recipe
from recipes.errors import DataError

from .samples import MOST, Sample, SampleSource, samples_digest
from .sources import Row, no_rows, read_rows
from .tokenization import (
    NOTHING_DROPPED,
    Dropped,
    PackedDocuments,
    RowTokenizer,
    TokenizedDocument,
    make_row_tokenizer,
    make_samples,
    tokenize_batches,
)

# ---- the order ---------------------------------------------------------------------------------------------

BLOCK = 1024  # positions assigned to data sets at once
BLOCK_SEED = (1 << 32) - 1  # separates the seeds of blocks from those of epochs


def shuffled_order(count: int, seed: int, epoch: int, shuffle: bool = True, part: int = 0) -> np.ndarray:
    """Permute 0 .. count - 1 by seed, epoch and part: (count,) int64. `part`: number, from 1 on, of a data
    set that has epochs of its own.

    The ranks of a raw PCG64 stream, which NumPy keeps stable over its versions (a Generator's permutation is
    not): a run must find its order again after an upgrade.
    """
    if not shuffle:
        return np.arange(count)
    key = [seed, epoch, 0, part] if part else [seed, epoch]
    return np.argsort(np.random.PCG64(key).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Mixture:
    """Data sets mixed in proportion to their weights.

    Each has its share of the first n positions to within a position or two, not by chance: positions are
    assigned in blocks of 1,024, and the seed draws the order within a block.
    """

    weights: tuple[float, ...]
    seed: int

    def draw(self, position: int) -> tuple[int, int]:
        """Return the number of the data set of a position, and how many draws of it came before."""
        block, offset = divmod(position, BLOCK)
        parts = deal_block(self.weights, self.seed, block)
        part = int(parts[offset])
        return part, self.before(block * BLOCK)[part] + int((parts[:offset] == part).sum())

    def before(self, position: int) -> list[int]:
        """Count the draws from each data set among the first `position` positions (whole blocks).

        The first gets its share, rounded down, the second its share of the remainder, and so on: a count
        never falls from one position to the next, and their sum is `position`.
        """
        counts, rest = list[int](), position
        for ratio in remaining_shares(self.weights):
            counts.append(rest * ratio.numerator // ratio.denominator)
            rest -= counts[-1]
        return counts


@lru_cache(maxsize=4)
def deal_block(weights: tuple[float, ...], seed: int, block: int) -> np.ndarray:
    """Assign a data set to each position of the block: (BLOCK,)."""
    mixture = Mixture(weights, seed)
    first, last = mixture.before(block * BLOCK), mixture.before((block + 1) * BLOCK)
    parts = np.repeat(np.arange(len(weights)), np.subtract(last, first))
    drawn = np.random.PCG64([seed, block, 0, BLOCK_SEED]).random_raw(BLOCK)
    return parts[np.argsort(drawn, kind="stable")]


@lru_cache(maxsize=4)
def remaining_shares(weights: tuple[float, ...]) -> tuple[Fraction, ...]:
    """Divide each weight by the sum of itself and all that follow; exact, so that rounding assigns no
    position twice. The last is 1."""
    exact = [Fraction(weight) for weight in weights]
    return tuple(weight / sum(exact[i:]) for i, weight in enumerate(exact))


# ---- a stream ----------------------------------------------------------------------------------------------

ROWS = 1024  # of a chunk, at most
CHARACTERS = 8 << 20  # of a chunk, about: bounds it where rows are books
CHECK = "crc32"  # key of a line of the index: of the others, as they are written
CACHED = 8  # chunks of a data set in memory


@dataclass(frozen=True)
class ChunkRecord:
    """A chunk's entry in the index."""

    part: int  # number of the data set
    epoch: int  # complete passes over the data set before
    rows: int  # of this epoch, up to the chunk's end
    samples: int  # in the chunk
    sha256: str  # of its samples


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a data set, as samples."""

    record: ChunkRecord
    samples: tuple[Sample, ...]
    dropped: Dropped


def index_line(record: ChunkRecord) -> str:
    """Format a record as a line of the index, with its checksum."""
    values = asdict(record)
    return json.dumps({**values, CHECK: zlib.crc32(json.dumps(values).encode())}) + "\n"


def record_in(line: str) -> ChunkRecord:
    """Parse a line of the index. Raises ValueError, TypeError or AttributeError where it is damaged."""
    values = json.loads(line)
    values.pop(CHECK, None)
    record = ChunkRecord(**values)
    if line != index_line(record):
        raise ValueError("it is not what was written")
    return record


def read_index(path: Path) -> tuple[list[ChunkRecord], int]:
    """Read the records of an index, up to the first line that is torn or damaged. Returns the number of that
    line too where it is damaged, or else 0."""
    found = list[ChunkRecord]()
    for raw in path.read_bytes().splitlines(keepends=True):
        line = raw.decode(errors="replace")
        try:
            found.append(record_in(line))
        except (ValueError, TypeError, AttributeError):
            return found, len(found) + 1 if line.endswith("\n") else 0
    return found, 0


class ChunkIndex:
    """The records of all data sets in the order they were made, a line each; a torn last line is dropped.

    A damaged line is dropped with those behind it, once the file was copied to <name>.before: the chunks are
    made again, with the same result.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: list[ChunkRecord] = []
        self.warning = ""  # what was damaged
        if path is not None and path.exists():
            self.known, damaged = read_index(path)
            if damaged:
                self.warning = f"{path} is damaged in line {damaged}: the stream is read again from there"
                shutil.copyfile(path, path.with_name(path.name + ".before"))
            lines = path.read_bytes().splitlines(keepends=True)[: len(self.known)]
            if (whole := b"".join(lines)) != path.read_bytes():
                path.write_bytes(whole)

    def append(self, record: ChunkRecord) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(index_line(record))


class StreamedDataset:
    """One data set of the stream.

    Args:
        skip: rows at its beginning that are held out.
        index: has the chunks of an earlier session of the run.
        thread: makes chunks ahead.
    """

    def __init__(
        self,
        number: int,
        tokenizer: RowTokenizer,
        seed: int,
        skip: int,
        index: ChunkIndex,
        thread: ThreadPoolExecutor,
    ) -> None:
        self.number, self.tokenizer, self.seed, self.skip = number, tokenizer, seed, skip
        self.index, self.thread = index, thread
        self.records = [record for record in index.known if record.part == number]
        self.starts = [0]  # place of the first sample of each chunk, and of the next one's
        for record in self.records:
            self.starts.append(self.starts[-1] + record.samples)
        self.cached: dict[int, Chunk] = {}
        self.next = -1  # number of the chunk being made in `ahead`
        self.ahead: Future[Chunk] | None = None
        self.source: Iterator[Row] = iter(())

    def sample(self, place: int) -> Sample:
        """The sample at `place` of this data set, epoch after epoch. Errors: DataError, HubUnreachable."""
        while place >= self.starts[-1]:
            self.chunk(len(self.records))
        number = bisect_right(self.starts, place) - 1
        return self.chunk(number).samples[place - self.starts[number]]

    def chunk(self, number: int) -> Chunk:
        if number in self.cached:
            return self.cached[number]
        if number != self.next or self.ahead is None:
            self._seek(number)
        assert self.ahead is not None
        ahead, self.ahead = self.ahead, None  # a failed chunk is tried again
        chunk = ahead.result()
        self._record(number, chunk.record)
        self.cached[number] = chunk
        if len(self.cached) > CACHED:
            self.cached.pop(next(iter(self.cached)))
        self.next, self.ahead = number + 1, self.thread.submit(self._make, number + 1, chunk.record)
        return chunk

    def _seek(self, number: int) -> None:
        """Read on from the beginning of chunk `number`, whose predecessor is known."""
        if self.ahead is not None:
            self.ahead.exception()  # two threads cannot read from one source
        before = self.records[number - 1] if number else ChunkRecord(self.number, 0, 0, 0, "")
        self.source = self._open(before.rows)
        self.next, self.ahead = number, self.thread.submit(self._make, number, before)

    def _open(self, passed: int) -> Iterator[Row]:
        return islice(read_rows(self.tokenizer.dataset, streaming=True), self.skip + passed, None)

    def _make(self, number: int, before: ChunkRecord) -> Chunk:
        """Make the chunk after `before`, read from `source`."""
        epoch, passed = before.epoch, before.rows
        taken = list(take_chunk(self.source))
        if not taken:
            if not any(record.samples for record in self.records if record.epoch == epoch):
                raise DataError(f"{self.tokenizer.dataset.path}: no sample has a token to train on")
            epoch, passed = epoch + 1, 0
            self.source = self._open(0)
            taken = list(take_chunk(self.source))
        data = self.tokenizer.data
        packed = make_samples(self.tokenizer.tokenize(taken), data)
        order = shuffled_order(len(packed.samples), self.seed, number, data.shuffle_dataset, self.number + 1)
        samples = tuple(packed.samples[i] for i in order)
        digest = samples_digest(samples)
        record = ChunkRecord(self.number, epoch, passed + len(taken), len(samples), digest)
        return Chunk(record, samples, packed.dropped)

    def _record(self, number: int, record: ChunkRecord) -> None:
        """Append a new chunk to the index, or compare one that was read again."""
        if number == len(self.records):
            self.records.append(record)
            self.starts.append(self.starts[-1] + record.samples)
            self.index.append(record)
        elif record != self.records[number]:
            dataset, known = self.tokenizer.dataset, self.records[number]
            said = f"{dataset.path}: the rows up to {known.rows:,} are not what they were earlier in this run"
            raise DataError(said, f"{dataset.key_path('revision')}: the revision that the run began with")


def take_chunk(source: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of one chunk."""
    characters = 0
    for row in islice(source, ROWS):
        yield row
        characters += len(str(row.fields))
        if characters > CHARACTERS:
            return


class StreamedCorpus(SampleSource):
    """The counterpart of `Corpus` for a run whose rows are read as they are needed."""

    def __init__(
        self,
        tokenizers: Sequence[RowTokenizer],  # one for each data set
        held_out: tuple[Sample, ...],
        mixture: Mixture,
        total: int,
        skip: int,
        index: ChunkIndex,
    ) -> None:
        self.held_out, self.mixture, self.total = held_out, mixture, total
        self.thread = ThreadPoolExecutor(1, "cocktail-stream")
        self.parts = [
            StreamedDataset(n, each, mixture.seed, skip, index, self.thread)
            for n, each in enumerate(tokenizers)
        ]
        self.lock = RLock()  # leases are sent by one thread of the hub and counted by another
        first = [part.chunk(0) for part in self.parts]
        self.found = tuple(f"{t.dataset.path}: streamed, {t.row_type}{t.unused_columns}" for t in tokenizers)
        dropped = sum((chunk.dropped for chunk in first), NOTHING_DROPPED)
        warnings = [index.warning] if index.warning else []
        warnings += [warning for tokenizer in tokenizers for warning in tokenizer.warnings]
        warnings += [f"of the first rows: {w}" for w in dropped.warnings(tokenizers[0].data.max_length)]
        self.warnings = tuple(dict.fromkeys(warnings))

    def __len__(self) -> int:
        return self.total

    def sample(self, position: int) -> Sample:
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} of a run of {self.total} samples")
        part, place = self.mixture.draw(position)
        with self.lock:
            return self.parts[part].sample(place)

    def digest(self) -> str:
        """sha256, hex, of the held-out samples and of each data set's first chunk; later chunks are compared
        when they are read again."""
        chunks = [part.records[0].sha256.encode() for part in self.parts]
        return samples_digest(self.held_out, *chunks, struct.pack("<2Q", len(self.held_out), self.total))

    def close(self) -> None:
        """Stop reading ahead."""
        self.thread.shutdown(wait=False, cancel_futures=True)


# ---- the corpus --------------------------------------------------------------------------------------------

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
        part, passed = self.mixture.draw(position)
        epoch, place = divmod(passed, self.sizes[part])
        order = _order(self.sizes[part], self.seed, epoch, self.shuffle, part + 1)
        return sum(self.sizes[:part]) + int(order[place])

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
    vocabulary: int | None = None,
) -> Corpus | StreamedCorpus:
    """Read, tokenize, split and pack the recipe's data: all of them, or their beginning where they are
    streamed. The tokenizer gets the chat template that was used.

    Args:
        index: file with the chunk index of a stream, for resuming without reading all again.
        progress: called with each data set's path and its number of tokenized rows.
        vocabulary: tokens that the model knows; a row with another one is an error.

    Errors: DataError where a row is broken or nothing is left to train on, HubUnreachable.
    """
    if recipe.data.streaming:
        return _stream(_Reader(recipe, tokenizer, vocabulary), index)
    reader = _Reader(recipe, tokenizer, vocabulary, progress)
    documents = [reader.read(dataset) for dataset in recipe.datasets]
    for dataset, part in zip(recipe.datasets, documents, strict=True):
        reader.warnings += few_rows(dataset.path, len(part))
    held = [reader.read(dataset) for dataset in recipe.eval_datasets]
    if recipe.data.val_set_size:
        documents, held = _split(documents, recipe.data.val_set_size, recipe.training.seed)
    reader.warnings += rows_in_both(documents, held)
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


def rows_in_both(documents: Parts, held: Parts) -> list[str]:
    """Warn of held-out rows that are trained as well: their loss says nothing of other rows."""
    measured = {hash(document.tokens.tobytes()) for part in held for document in part if len(document.tokens)}
    if not measured:
        return []
    found = len(measured.intersection(hash(one.tokens.tobytes()) for part in documents for one in part))
    return [f"{found:,} of {len(measured):,} held-out rows are trained too"] if found else []


def _stream(reader: _Reader, index: Path | None) -> StreamedCorpus:
    """Open a stream; the first `val_set_size` rows of each data set are held out."""
    recipe, data, skip = reader.recipe, reader.recipe.data, int(reader.recipe.data.val_set_size)
    opened = [reader.open(dataset, streaming=True) for dataset in recipe.datasets]
    tokenizers = [each for each, _ in opened]
    held = [each.tokenize(list(islice(source, skip))) for each, source in opened]
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
    vocabulary: int | None = None
    progress: Callable[[str, int], None] = lambda path, rows: None
    found: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def read(self, dataset: Dataset) -> list[TokenizedDocument]:
        tokenizer, source = self.open(dataset)
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

    def open(self, dataset: Dataset, streaming: bool = False) -> tuple[RowTokenizer, Iterator[Row]]:
        """Detect the type of the rows by the first; returns their tokenizer, and all of them."""
        source, recipe = read_rows(dataset, streaming), self.recipe
        first = next(source, None)
        if first is None:
            raise no_rows(dataset.path)
        options = recipe.data, dataset, first, recipe.objective, self.vocabulary
        return make_row_tokenizer(self.tokenizer, *options), chain([first], source)


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


def preview_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, count: int = BATCH, vocabulary: int | None = None
) -> list[Preview]:
    """Turn the first `count` rows of each data set into samples; no more of hub data is fetched.

    Errors: as `build_corpus`.
    """
    found, reader = [], _Reader(recipe, tokenizer, vocabulary)
    for dataset in recipe.datasets:
        rows, source = reader.open(dataset, streaming=True)
        packed = make_samples(rows.tokenize(list(islice(source, count))), recipe.data)
        warnings = (*rows.warnings, *packed.dropped.warnings(recipe.data.max_length))
        seen = rows.row_type, packed, warnings, tuple(rows.unused), recipe.objective.sequences
        found.append(Preview(dataset.path, *seen))
    return found
