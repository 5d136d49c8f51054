"""A standby's thread: a session with the hub that brings its copy up to date, commit by commit."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from transport.ledger import ERROR_FEEDBACK, HEADER_SIZE
from transport.peer import LinkLimits, PeerIdentity, PeerLink, hashes_size
from transport.protocol import (
    LedgerError,
    LinkLost,
    ProtocolError,
    RefusedByHub,
    RunOver,
    RunURL,
    SessionRenewed,
    TransportError,
    messages,
    read_json,
    read_msgpack,
)
from transport.transfer import HASH_BLOCK, FreeDisk, Spool

from .bodies import NAME, Grown, Manifest, ReplicaFile, Stored
from .ledger_copy import LedgerChanges, LedgerCopy
from .succession import HEARD_S

LOOK_S = 10.0  # seconds between two looks at the hub's files
AT_ONCE = 16  # rounds whose updates are fetched together
LEAST_LOG = 64 << 20  # bytes of updates before the hub's newer error feedback is fetched in their place
AGAIN_S = 0.5  # seconds before the hub is dialled again
MANIFEST = "manifest.json"  # the newest one
SAVED = f"ledger/{ERROR_FEEDBACK}"
MOST_MANIFEST, MOST_CHANGES = 8 << 20, 16 << 20  # bytes of a list of files, of rows of the ledger
PACKETS_AT_ONCE = 16 << 20  # bytes; a hub sends 8 MiB at once, or one packet
SENT = ("base", "data", "snapshots", "tokenizer")  # folders that a hub may send files of
BOUNDS = {  # as those of transport.peer
    "replica/packets/": "the recipe's compression of these rounds' samples",
    "ledger/": "what a hub sends of its ledger at once",
    "updates/": "what the disk of a standby has room for",
    "replica/": "the size that the hub has listed",
}
SENT_FILES = ("recipe.json", "recipe.yaml", "stream.jsonl", SAVED)


class Follower:
    """Follows one run into `folder` until `close`.

    Args:
        watch: called with the copy when it has changed.
        longest: round -> the most bytes of its packet. Called once the files of the hub's folder are here.
    """

    def __init__(
        self,
        url: RunURL,
        identity: PeerIdentity,
        folder: Path,
        watch: Callable[[LedgerCopy], None],
        notify: Callable[[str], None],
        longest: Callable[[int], int],
    ) -> None:
        self.url, self.folder = url, folder
        self._identity, self._watch, self._notify, self._longest = identity, watch, notify, longest
        self._disk = FreeDisk(folder)
        self._spool = Spool(folder, self._disk)
        self.copy = LedgerCopy(folder / "ledger")
        self.manifest: Manifest | None = None
        self.saved = 0  # the round before which the error feedback here is
        self.synced = threading.Event()  # the copy was whole
        if (folder / MANIFEST).is_file() and self.copy.rounds:  # this standby was started again
            self.manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
            self.synced.set()
        self.over: messages.Over | None = None
        self.error: Exception | None = None  # why this standby cannot follow any more
        self.ended = threading.Event()
        self._stop = threading.Event()
        self._looked = 0.0
        self._link: PeerLink | None = None
        self._grown: Grown | None = None  # the newest of the session
        self._number = 0  # of the one that the copy has
        self._thread = threading.Thread(target=self._run, name="cocktail-standby", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the session, and leave the copy as it is on the disk."""
        self._stop.set()
        if self._link is not None:
            self._link.abandon()
        self._thread.join(30.0)
        self.copy.close()

    @property
    def silence(self) -> float:
        """Return the seconds since the hub was last heard, also while something is fetched; inf: there is no
        session with it."""
        return inf if self._link is None else self._link.heard_s

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self.over is None:
                try:
                    self._session()
                except (LinkLost, RunOver, SessionRenewed) as lost:
                    self.over = self._link.over if self._link and isinstance(lost, RunOver) else None
                except RefusedByHub as refused:
                    if refused.code not in ("full", "session", "term") or not self.synced.is_set():
                        raise
                except (KeyError, LedgerError, ProtocolError) as odd:
                    self._notify(f"what the hub sent does not fit, and is fetched again: {odd}")
                except TransportError:  # it cannot be reached: dialled again, if this standby has followed
                    if not self.synced.is_set():
                        raise
                if self._link is not None:
                    self._link.close()
                self._stop.wait(AGAIN_S)
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    def _session(self) -> None:
        """Follow for as long as one session of one hub lasts."""
        limits = LinkLimits(patience=HEARD_S)
        link = self._link = PeerLink(self.url, self._identity, limits, notify=self._notify)
        link.bounds_of_extensions |= BOUNDS
        self._grown, self._number = None, 0
        link.listen({NAME: self._hear})
        term = link.connect(HEARD_S).term
        self._look(link)
        self._looked = time.monotonic()
        while not self._stop.is_set() and link.welcome.term == term:
            if link.over is not None:
                self._fetch(link, self._number + 1)
                self.over = link.over
                link.leave("the run is over")
                return
            link.wait("news of the ledger", lambda: self._news() is not None or link.over is not None, 0.5)
            if (grown := self._news()) is not None:
                self._fetch(link, grown.number)
                link.say(NAME, msgspec.msgpack.encode(Stored(grown.number, self.copy.rounds)))
                self._number = grown.number
                self._watch(self.copy)
                self.synced.set()
            if time.monotonic() >= self._looked + LOOK_S:
                self._look(link)
                self._looked = time.monotonic()

    def _hear(self, body: bytes) -> None:
        """Take the hub's word that its ledger has changed; in the link's thread."""
        self._grown = read_msgpack(body, Grown, "what the hub says of its ledger")

    def _news(self) -> Grown | None:
        grown = self._grown
        return grown if grown is not None and grown.number != self._number else None

    # ---- the ledger ----------------------------------------------------------------------------------------

    def _fetch(self, link: PeerLink, number: int) -> None:
        """Bring the copy to where the ledger is. Raises KeyError, LedgerError, and as PeerLink.fetch."""
        while True:
            copy = self.copy
            changes = link.fetch(f"ledger/{copy.link}/{number}", MOST_CHANGES)
            new = read_msgpack(changes, LedgerChanges, "the hub's changes of its ledger")
            try:
                start, stop = copy.rounds, copy.rounds + len(new.rounds)
            except (LookupError, TypeError, ValueError) as error:
                raise LedgerError(f"the hub's changes of its ledger cannot be read: {error}") from None
            with ExitStack() as stack:
                packets: BinaryIO = io.BytesIO()
                if stop > start:
                    # as many as a hub sends at once, or those of one round
                    most = max(PACKETS_AT_ONCE, HEADER_SIZE + max(map(self._longest, new.rounds)))
                    packets = self._spooled(link, f"replica/packets/{start}-{stop}", most, stack)
                copy.apply(changes, packets, self._updates(link, stop, stack), self._longest)
            if new.newest:
                return

    def _spooled(self, link: PeerLink, name: str, most: int, stack: ExitStack) -> BinaryIO:
        """Fetch an object into a file, which is there until `stack` is closed."""
        download = link.begin_spooled(name, most, self._spool)
        stack.callback(link.forget, download)
        return link.finish_spooled(download)

    def _updates(self, link: PeerLink, stop: int, stack: ExitStack) -> list[BinaryIO]:
        """Fetch the updates up to round `stop`; where the hub has cleared them, its error feedback first."""
        got = list[BinaryIO]()
        start = self.copy.next_update
        while start < stop:
            until = min(stop, start + AT_ONCE)
            try:
                got.append(self._spooled(link, f"updates/{start}-{until}", self._disk.free, stack))
                start = until
            except KeyError:
                before = self.saved
                self._look(link)
                start, got = self.copy.next_update, []
                if self.saved == before:  # nor are they in its error feedback: they were cleared just now
                    raise
        return got

    # ---- files ---------------------------------------------------------------------------------------------

    def _look(self, link: PeerLink) -> None:
        """Fetch the files that have come or changed, and remove those that the hub has removed."""
        text = link.fetch(f"replica/manifest/{time.monotonic_ns()}", MOST_MANIFEST)
        manifest = read_json(text, Manifest, "the hub's list of files")
        wanted = {one.path: one for one in manifest.files}
        self._disk.take(
            sum(one.size for one in manifest.files if not self._is_here(one)), "what is new there"
        )
        for one in manifest.files:
            if one.path != SAVED:
                self._take(link, one)
        if SAVED in wanted and self._wants_saved(manifest.saved):
            self._take(link, wanted[SAVED])
            self.copy.cut_updates(manifest.saved)
            self.saved = manifest.saved
        for path in (self.folder / "snapshots").glob("*/*"):
            if path.relative_to(self.folder).as_posix() not in wanted:
                path.unlink()
        for folder in (self.folder / "snapshots").glob("*"):
            with contextlib.suppress(OSError):
                folder.rmdir()
        self.manifest = manifest
        part = self.folder / (MANIFEST + ".part")
        part.write_bytes(text)
        os.replace(part, self.folder / MANIFEST)

    def _wants_saved(self, saved: int) -> bool:
        """Tell whether the hub's error feedback is to replace updates here: they are many, or not here."""
        behind = saved > self.copy.next_update
        return behind or (saved <= self.copy.rounds and self.copy.updates_size > LEAST_LOG)

    def _is_here(self, one: ReplicaFile) -> bool:
        try:
            about = (self.folder / one.path).stat()
        except (OSError, ValueError):
            return False
        return (about.st_size, about.st_mtime_ns) == (one.size, one.stamp)

    def _take(self, link: PeerLink, one: ReplicaFile) -> None:
        parts = PurePosixPath(one.path).parts
        known = one.path in SENT_FILES or (len(parts) > 1 and parts[0] in SENT)
        if not known or ".." in parts or "\\" in one.path or ":" in one.path:
            raise ProtocolError(f"the hub offers a file {one.path[:80]!r}, which no run has")
        to = self.folder / one.path
        if self._is_here(one):
            return
        name = f"{one.stamp}/{one.path}"
        if one.size <= HASH_BLOCK:
            to.parent.mkdir(parents=True, exist_ok=True)
            part = to.with_name(to.name + ".part")
            part.write_bytes(link.fetch(f"replica/{name}", one.size))
            os.replace(part, to)
        else:
            hashes = link.fetch(f"replica/hashes/{name}", hashes_size(one.size))
            download = link.begin_file(f"replica/{name}", to, one.size, hashes)
            try:
                link.finish_file(download)
            finally:
                link.forget(download)
        os.utime(to, ns=(one.stamp, one.stamp))
