"""Fetches over a PeerLink what the state machine of catch_up.py asks for.

Requests are made ahead: all files of a base are fetched at once, and packets long before they are applied.
The link's thread receives them meanwhile, also while a model loads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from transport.ledger import read_packets
from transport.protocol import LedgerError, NotServed, ProtocolError, SessionRenewed, TooLong, messages
from transport.transfer import HASH_BLOCK, Download, Spool

from .catch_up import CatchUp, CatchUpState, Progress, Range
from .connection_manager import hashes_size
from .peer_link import PeerLink

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class WantedFile:
    """A file to fetch, which is an object of the run."""

    name: str  # of the object
    path: Path
    size: int
    sha256: str = ""  # hex; for a file of one block, which needs no list of hashes
    hashes: str = ""  # hex; SHA-256 of the object "hashes/<name>"


class CatchUpDownloads:
    """The downloads of one joining peer. The thread that waits here calls `on_progress`.

    Args:
        spool: where packets wait until they are applied.
    """

    def __init__(
        self,
        link: PeerLink,
        machine: CatchUp,
        spool: Spool,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.link, self.machine, self.spool, self._on_progress = link, machine, spool, on_progress
        self._room = 0  # bytes of packets that the disk has room for, as when the first were requested
        self.received = 0  # bytes of files fetched
        # given the files that are being fetched, to fetch some of them elsewhere
        self.beside: Callable[[Sequence[Download]], object] = lambda downloads: None
        self._files: list[Download] = []
        self._ranges: deque[tuple[Range, Download]] = deque()  # under way, in order

    def files(self, wanted: Sequence[WantedFile]) -> None:
        """Fetch files, all at once; of a file on the disk only the wrong blocks. Allowed in any state. Raises
        NotServed, TooLong, OSError, Leaving, RunOver, LinkLost."""
        before = self.received
        try:
            for file in wanted:
                hashes = self._hashes(file)
                begin = self._again(self.link.begin_file, file.name, file.path, file.size, hashes)
                self._files.append(begin)
            self.beside(self._files)
            for download in self._files:
                self._again(self.link.finish_file, download, self._tick)
        except TooLong:  # no snapshot that has gone, but a lie
            raise
        except (KeyError, ProtocolError) as error:
            raise NotServed(str(error.args[0])) from error
        finally:
            self.link.forget(*self._files)
            self.received = before + sum(download.received for download in self._files)
            self._files = []

    def _hashes(self, file: WantedFile) -> bytes:
        if file.size <= HASH_BLOCK and file.sha256:
            return bytes.fromhex(file.sha256)
        if not file.hashes:
            raise ProtocolError(f"the hub announces no hashes of {file.name}")
        most = hashes_size(file.size)
        return self._again(self.link.fetch, f"hashes/{file.name}", most, file.hashes)

    def ask_anew(self) -> messages.Welcome:
        """Ask the hub for its current offers."""
        return self._again(self.link.ask_anew)

    def ask_ahead(self) -> None:
        """Request as many packets as the machine allows; they arrive whatever this thread does next."""
        self._room = self._room or self.spool.room.free
        while (range := self.machine.next_range(self._room)) is not None:
            self._ranges.append((range, self._begin(range)))

    def _begin(self, range: Range) -> Download:
        return self._again(self.link.begin_spooled, range.name, range.most, self.spool)

    def packets(self) -> Iterator[tuple[int, bytes]]:
        """Yield (round, packet) in order until all committed rounds are applied. A packet counts as applied
        when the next is requested.

        Raises NotServed, TooLong, NoRoom, Leaving, RunOver, LinkLost.
        """
        while True:
            self.machine.heard(self.link.newest_round)
            self.ask_ahead()
            if not self._ranges:
                assert self.machine.state is CatchUpState.READY
                return
            range, download = self._ranges[0]
            records = self._records(range, download)
            if records is None:
                continue
            self.machine.range_came(range, download.size)
            self.ask_ahead()
            try:
                for round, packet in read_packets(records, self.machine.longest):
                    self.link.raise_if_leaving()
                    if round != self.machine.applied:
                        raise NotServed(f"{range.name} has round {round}, not {self.machine.applied}")
                    yield round, packet
                    self.machine.apply(round)
            except LedgerError as error:
                raise NotServed(f"{range.name} comes damaged: {error}") from error
            self._ranges.popleft()
            self.link.forget(download)
            if self.machine.applied != range.stop:
                raise NotServed(f"{range.name} ends with round {self.machine.applied - 1}")
            self._tick()

    def _records(self, range: Range, download: Download) -> BinaryIO | None:
        """Wait for the packets of the first range; None where smaller ranges are requested in its place."""
        try:
            return self._again(self.link.finish_spooled, download, self._tick)
        except TooLong:
            parts = self.machine.shorter(range)
            if not parts:
                raise
            self.link.forget(download)
            self._ranges.popleft()
            self._ranges.extendleft((part, self._begin(part)) for part in reversed(parts))
            return None
        except (KeyError, ProtocolError) as error:
            raise NotServed(str(error.args[0])) from error

    def _again(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call, and repeat after each new session: objects belong to the run, so downloads go on."""
        while True:
            try:
                return call(*given, **named)
            except SessionRenewed:
                continue

    def _tick(self) -> None:
        self.machine.weights_came(self.received + sum(download.received for download in self._files))
        under = sum(download.received for _, download in self._ranges)
        self._on_progress(self.machine.progress(time.monotonic(), under))

    def close(self) -> None:
        """Drop the downloads under way."""
        self.link.forget(*(download for _, download in self._ranges))
        self._ranges.clear()
