"""A corpus too large for memory: rows are read, tokenized and packed when their positions are asked for.

Each data set is read in chunks of rows, one after the other, and again from its beginning at its end. A chunk
is packed and shuffled by itself, so the chunk is all the state there is. An index on disk has the number of
rows and samples before each chunk and the hash of its samples. A resumed run skips the rows before, and a
chunk that is read again must have the same hash. Without the index everything is tokenized again, with the
same result.

A few chunks are cached, for the leases in progress; the next one is made ahead, in a thread.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from threading import RLock

from recipes.errors import DataError

from .packing import NOTHING_DROPPED, Dropped, make_samples
from .sample_order import Mixture, shuffled_order
from .samples import Sample, SampleSource, samples_digest
from .sources import Row, read_rows
from .tokenization import RowTokenizer

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
            path, known = self.tokenizer.dataset.path, self.records[number]
            said = f"{path}: the rows up to {known.rows:,} are not what they were earlier in this run"
            raise DataError(said, "datasets.0.revision: the revision that the run began with")


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
        self.found = tuple(f"{t.dataset.path}: streamed, {t.row_type}{t.unused_columns}" for t in tokenizers)
        first = [part.chunk(0) for part in self.parts]
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
        draw = self.mixture.draw(position)
        with self.lock:
            return self.parts[draw.part].sample(draw.place)

    def digest(self) -> str:
        """sha256, hex, of the held-out samples and of each data set's first chunk; later chunks are compared
        when they are read again."""
        chunks = [part.records[0].sha256.encode() for part in self.parts]
        return samples_digest(self.held_out, *chunks, struct.pack("<2Q", len(self.held_out), self.total))

    def close(self) -> None:
        """Stop reading ahead."""
        self.thread.shutdown(wait=False, cancel_futures=True)
