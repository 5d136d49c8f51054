"""A corpus that is too large to hold: rows are read, tokenized and packed as positions ask for them.

Each data set is read in *chunks* of rows, one after the other, and at its end from its beginning. A chunk
becomes samples by itself: packed within it, shuffled within it. So the chunk is all the state there is. An
index on the disk says how many rows and samples lie before each, and what it came to; a run that goes on
passes over the rows before, and a chunk that is read again must come to the same. Without the index all is
tokenized again, and comes to the same too.

Some chunks are kept, those of leases that are under way; the next one is made ahead, in a thread.
"""

from __future__ import annotations

import json
import struct
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
LETTERS = 8 << 20  # in a chunk, about: where rows are books
KEPT = 8  # chunks of a data set in memory


@dataclass(frozen=True)
class ChunkRecord:
    """A chunk, as the index has it."""

    part: int  # number of the data set
    epoch: int  # how often the data set ended before
    rows: int  # of this epoch, up to the chunk's end
    samples: int  # in the chunk
    sha256: str  # of them


@dataclass(frozen=True)
class Chunk:
    """Rows of a data set that follow each other, as samples."""

    record: ChunkRecord
    samples: tuple[Sample, ...]
    lost: Dropped


class StreamedDataset:
    """One data set of the stream.

    Args:
        skip: rows at its beginning that are held out.
        records: its chunks, as far as the run has come before.
        thread: makes chunks ahead.
    """

    def __init__(
        self,
        number: int,
        encoder: RowTokenizer,
        seed: int,
        skip: int,
        records: Sequence[ChunkRecord],
        index: ChunkIndex,
        thread: ThreadPoolExecutor,
    ) -> None:
        self.number, self.encoder, self.seed, self.skip = number, encoder, seed, skip
        self.records, self.index, self.thread = list(records), index, thread
        self.starts = [0]  # place of the first sample of each chunk, and of the next one's
        for record in self.records:
            self.starts.append(self.starts[-1] + record.samples)
        self.kept: dict[int, Chunk] = {}
        self.next = -1  # the chunk that `ahead` makes
        self.ahead: Future[Chunk] | None = None
        self.source: Iterator[Row] = iter(())

    def sample(self, place: int) -> Sample:
        """The sample at `place` of this data set, epoch after epoch. Errors: DataError, HubUnreachable."""
        while place >= self.starts[-1]:
            self.chunk(len(self.records))
        number = bisect_right(self.starts, place) - 1
        return self.chunk(number).samples[place - self.starts[number]]

    def chunk(self, number: int) -> Chunk:
        if number in self.kept:
            return self.kept[number]
        if number != self.next or self.ahead is None:
            self._go_to(number)
        assert self.ahead is not None
        ahead, self.ahead = self.ahead, None  # what fails is tried again
        chunk = ahead.result()
        self._know(number, chunk.record)
        self.kept[number] = chunk
        if len(self.kept) > KEPT:
            self.kept.pop(next(iter(self.kept)))
        self.next, self.ahead = number + 1, self.thread.submit(self._made, number + 1, chunk.record)
        return chunk

    def _go_to(self, number: int) -> None:
        """Read on from the beginning of chunk `number`, whose forerunner is known."""
        if self.ahead is not None:
            self.ahead.exception()  # two threads cannot read from one source
        before = self.records[number - 1] if number else ChunkRecord(self.number, 0, 0, 0, "")
        self.source = self._opened(before.rows)
        self.next, self.ahead = number, self.thread.submit(self._made, number, before)

    def _opened(self, passed: int) -> Iterator[Row]:
        return islice(read_rows(self.encoder.dataset, streaming=True), self.skip + passed, None)

    def _made(self, number: int, before: ChunkRecord) -> Chunk:
        """The chunk after `before`, read from `source`."""
        epoch, passed = before.epoch, before.rows
        taken = list(take_chunk(self.source))
        if not taken:
            if not any(record.samples for record in self.records if record.epoch == epoch):
                raise DataError(f"{self.encoder.dataset.path}: no sample has a token to train on")
            epoch, passed = epoch + 1, 0
            self.source = self._opened(0)
            taken = list(take_chunk(self.source))
        packed = make_samples(self.encoder.encode(taken), self.encoder.data)
        order = shuffled_order(
            len(packed.samples), self.seed, number, self.encoder.data.shuffle_dataset, self.number + 1
        )
        samples = tuple(packed.samples[i] for i in order)
        digest = samples_digest(samples)
        record = ChunkRecord(self.number, epoch, passed + len(taken), len(samples), digest)
        return Chunk(record, samples, packed.lost)

    def _know(self, number: int, record: ChunkRecord) -> None:
        if number == len(self.records):
            self.records.append(record)
            self.starts.append(self.starts[-1] + record.samples)
            self.index.append(record)
        elif record != self.records[number]:
            path, known = self.encoder.dataset.path, self.records[number]
            raise DataError(
                f"{path}: the rows up to {known.rows:,} are not what they were earlier in this run"
            )


def take_chunk(source: Iterator[Row]) -> Iterator[Row]:
    """The rows of a chunk."""
    letters = 0
    for row in islice(source, ROWS):
        yield row
        letters += len(str(row.fields))
        if letters > LETTERS:
            return


class ChunkIndex:
    """The records of all data sets in the order they were made, a line each. A last line that was cut off by
    a crash is made again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def read(self) -> list[ChunkRecord]:
        if self.path is None or not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        return [ChunkRecord(**json.loads(line)) for line in whole.splitlines()]

    def append(self, record: ChunkRecord) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")


class StreamedCorpus(SampleSource):
    """What recipes.data.Corpus is, for a run whose rows are read as they are needed."""

    def __init__(
        self,
        encoders: Sequence[RowTokenizer],  # of each data set
        held_out: tuple[Sample, ...],
        mixture: Mixture,
        total: int,
        skip: int,
        index: ChunkIndex,
    ) -> None:
        self.held_out, self.mixture, self.total = held_out, mixture, total
        self.thread = ThreadPoolExecutor(1, "cocktail-stream")
        known = index.read()
        self.parts = [
            StreamedDataset(
                n, encoder, mixture.seed, skip, [r for r in known if r.part == n], index, self.thread
            )
            for n, encoder in enumerate(encoders)
        ]
        self.lock = RLock()  # leases are sent by one thread of the hub and counted by another
        self.found = tuple(f"{e.dataset.path}: streamed, {e.kind}" for e in encoders)
        first = [part.chunk(0) for part in self.parts]
        self.lost = sum((chunk.lost for chunk in first), NOTHING_DROPPED)
        told = [warning for encoder in encoders for warning in encoder.warnings]
        told += [f"of the first rows: {w}" for w in self.lost.warnings(encoders[0].data.max_length)]
        self.warnings = tuple(dict.fromkeys(told))

    def __len__(self) -> int:
        return self.total

    def sample(self, position: int) -> Sample:
        if not 0 <= position < self.total:
            raise IndexError(f"position {position} of a run of {self.total} samples")
        draw = self.mixture.draw(position)
        with self.lock:
            return self.parts[draw.part].sample(draw.place)

    def digest(self) -> str:
        """sha256, hex, of what is held out and of the first chunk of each data set; what comes later is
        compared when it is read again."""
        chunks = [part.records[0].sha256.encode() for part in self.parts]
        return samples_digest(self.held_out, *chunks, struct.pack("<2Q", len(self.held_out), self.total))

    def close(self) -> None:
        """Read no further."""
        self.thread.shutdown(wait=False, cancel_futures=True)
