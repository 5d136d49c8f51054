"""A newcomer's files from peers that have them, beside the hub: the base model's, and snapshots; and the port
of a peer that has them.

The hub sends a file from its start on, and each peer chunks from its end, two blocks at a time. A block
counts once it has the hash that the hub has announced. What a peer does not send, the hub sends.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transport.direct import DirectLinks, Fragment, PeerServer, ReachablePeer
from transport.peer import PeerLink
from transport.protocol import ProtocolError, TransportError, messages
from transport.transfer import CHUNK, HASH_BLOCK, ChunkFile, Download, ObjectSource

from .bodies import Source
from .packet_sources import MEMBERS, ForwardedChunks, report_failed

log = logging.getLogger(__name__)

BLOCK = HASH_BLOCK // CHUNK  # chunks
SHARE = 2 * BLOCK  # chunks that a peer is asked for at a time
NEWCOMERS = "newcomers"  # who fetches files
LAST_S = 5.0  # for such a share, where nothing else is left to be fetched


class LastChunks(Exception):
    """Gives a share back: nothing else of its file is lacking, and the hub may be faster."""


class FileSources:
    """Fetches files from peers; `dial` makes a link to one. `close` ends it."""

    def __init__(self, link: PeerLink, dial: Callable[[ReachablePeer], PeerLink]) -> None:
        self._link, self._links = link, DirectLinks(dial)
        self._over = False
        self._failed: set[str] = set()
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="cocktail-files")

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far, beside those of the link to the hub."""
        return self._links.traffic

    def fetch(self, helpers: Sequence[Source], downloads: Sequence[Download]) -> None:
        """Begin to fetch shares of files that are being downloaded from the hub (`PeerLink.begin_file`)."""
        for source in helpers:
            if source.name not in self._failed:
                self._threads.submit(self._receive, source, tuple(downloads))

    def _receive(self, source: Source, downloads: Sequence[Download]) -> None:
        """Fetch shares until none is left, or this source fails; in a thread of its own."""
        for download in downloads:
            while not self._over and (chunks := self._link.take_share(download, SHARE)):
                try:
                    self._share(source, download, chunks)
                except LastChunks:
                    break
                except (TransportError, KeyError, ProtocolError) as error:
                    log.debug("from %s", source.name, exc_info=error)
                    self._fail(source, error)
                    return
                finally:
                    self._link.request(download, chunks)  # what lacks

    def _share(self, source: Source, download: Download, chunks: range) -> None:
        """Fetch some chunks. Raises ProtocolError: they are not those of the file."""
        link, file, began = self._links.to(source), download.sink, time.monotonic()
        assert isinstance(file, ChunkFile)
        blocks: dict[int, dict[int, bytes]] = {}

        def take(index: int, payload: bytes) -> None:
            block, first = blocks.setdefault(index // BLOCK, {}), index // BLOCK * BLOCK
            block[index] = payload
            if len(block) < min(BLOCK, file.map.count - first):
                return
            if not file.is_right(index // BLOCK, b"".join(block[i] for i in sorted(block))):
                raise ProtocolError(f"block {index // BLOCK} of {download.name} has wrong bytes")
            for i in sorted(block):
                self._link.supply(download, i, block[i])

        def look() -> None:
            last = self._link.nothing_to_request(download) and time.monotonic() - began > LAST_S
            if self._over or last:
                raise LastChunks

        ForwardedChunks(file.map, chunks, take).receive(link, download.name, look)

    def _fail(self, source: Source, error: Exception) -> None:
        """Ask this source no more; tell the hub where it has sent wrong bytes."""
        self._failed.add(source.name)
        self._links.drop(source.name)
        if isinstance(error, ProtocolError) and not self._over:
            report_failed(self._link, source.name, str(error), wrong=True)

    def close(self) -> None:
        """End what is under way, and hang up."""
        self._over = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._links.close()


def serve_files(server: PeerServer, files: Mapping[str, Path], busy: Callable[[], bool]) -> None:
    """Serve files to newcomers and members, while this peer's line has nothing else to send (`busy`)."""

    def read(guest: str, m: messages.Get) -> Fragment | None:
        if busy():
            return None
        try:
            with open(files[m.name], "rb") as file:
                source = ObjectSource(file, 0, os.fstat(file.fileno()).st_size, b"")
                return Fragment(source.read(m.index, m.chunk), source.size)
        except (KeyError, OSError) as error:  # whose text may name folders of this machine
            raise KeyError(f"it is not here: {type(error).__name__}") from None

    for prefix in {name.partition("/")[0] for name in files}:
        server.serve(f"{prefix}/", read, NEWCOMERS, MEMBERS)
