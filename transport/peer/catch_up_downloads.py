"""Brings what a machine that catches up (catch_up.py) asks for, over a PeerLink.

Nothing here waits for one thing where it could have asked for the next: all files of a base are under way at
once, and packets are asked for far ahead of whoever applies them. The link's thread gathers them meanwhile,
so they come while a model loads too.
"""

from __future__ import annotations

import io
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from transport.ledger import read_packets
from transport.protocol import LedgerError, NotServed, ProtocolError, SessionRenewed, Welcome
from transport.transfer import HASH_BLOCK, Download

from .catch_up import CatchUp, CatchUpState, Progress, Range
from .peer_link import PeerLink

T = TypeVar("T")


@dataclass(frozen=True)
class WantedFile:
    """A file that is an object of the run."""

    name: str  # of the object
    path: Path
    size: int
    sha256: str = ""  # hex; of a file of one block, which needs no list of hashes
    hashes: str = ""  # hex; SHA-256 of the object "hashes/<name>"


class CatchUpDownloads:
    """One joiner's fetching. `told` hears of progress, in the thread that waits here."""

    def __init__(
        self, link: PeerLink, machine: CatchUp, told: Callable[[Progress], None] = lambda _: None
    ) -> None:
        self.link, self.machine, self._told = link, machine, told
        self.came = 0  # bytes of files that came over the line
        self._files: list[Download] = []
        self._ranges: deque[tuple[Range, Download]] = deque()  # under way, in order

    def files(self, wanted: Sequence[WantedFile]) -> None:
        """Fetch files, all at once; of what is here already only what is wrong. In any state.

        Raises NotServed, OSError, Leaving, RunOver, LinkLost.
        """
        came = self.came
        try:
            for file in wanted:
                hashes = self._hashes(file)
                begin = self._again(lambda f=file, h=hashes: self.link.begin_file(f.name, f.path, f.size, h))  # type: ignore[misc]
                self._files.append(begin)
            for download in self._files:
                self._again(lambda d=download: self.link.finish_file(d, self._tick))  # type: ignore[misc]
        except (KeyError, ProtocolError) as error:
            raise NotServed(str(error.args[0])) from error
        finally:
            self.link.forget(*self._files)
            self.came = came + sum(download.received for download in self._files)
            self._files = []

    def _hashes(self, file: WantedFile) -> bytes:
        if file.size <= HASH_BLOCK and file.sha256:
            return bytes.fromhex(file.sha256)
        if not file.hashes:
            raise ProtocolError(f"the hub announces no hashes of {file.name}")
        return self._again(lambda: self.link.fetch(f"hashes/{file.name}", file.hashes))

    def ask_anew(self) -> Welcome:
        """What the hub offers now."""
        return self._again(self.link.ask_anew)

    def ask_ahead(self) -> None:
        """Ask for as many packets as the machine allows. They come whatever this thread does next."""
        while (range := self.machine.next_range()) is not None:
            self._ranges.append((range, self._again(lambda r=range: self.link.begin(r.name))))  # type: ignore[misc]

    def packets(self) -> Iterator[tuple[int, bytes]]:
        """(round, packet), in order, until those of all committed rounds are applied: each when the next one
        is asked for.

        Raises NotServed, Leaving, RunOver, LinkLost.
        """
        while True:
            self.machine.heard(self.link.newest_round)
            self.ask_ahead()
            if not self._ranges:
                assert self.machine.state is CatchUpState.READY
                return
            range, download = self._ranges[0]
            records = self._records(range, download)
            self._ranges.popleft()
            self.machine.range_came(range, len(records))
            self.ask_ahead()
            try:
                for round, packet in read_packets(io.BytesIO(records)):
                    self.link.raise_if_leaving()
                    if round != self.machine.applied:
                        raise NotServed(f"{range.name} has round {round}, not {self.machine.applied}")
                    yield round, packet
                    self.machine.apply(round)
            except LedgerError as error:
                raise NotServed(f"{range.name} comes damaged: {error}") from error
            if self.machine.applied != range.stop:
                raise NotServed(f"{range.name} ends with round {self.machine.applied - 1}")
            self._tick()

    def _records(self, range: Range, download: Download) -> bytes:
        try:
            return self._again(lambda: self.link.finish(download, self._tick))
        except (KeyError, ProtocolError) as error:
            raise NotServed(str(error.args[0])) from error

    def _again(self, call: Callable[[], T]) -> T:
        """Call, again after each new session: objects are the run's, what is under way goes on."""
        while True:
            try:
                return call()
            except SessionRenewed:
                continue

    def _tick(self) -> None:
        self.machine.weights_came(self.came + sum(download.received for download in self._files))
        under = sum(download.received for _, download in self._ranges)
        self._told(self.machine.progress(time.monotonic(), under))

    def close(self) -> None:
        """What is under way is not wanted any more."""
        self.link.forget(*(download for _, download in self._ranges))
        self._ranges.clear()
