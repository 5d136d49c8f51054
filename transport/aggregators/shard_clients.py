"""A member's own links to the owners that can be reached: parts go there, packets of shards come back.

What does not go this way goes through the hub: an owner that could not be dialled, or does not answer, is
left alone for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from transport.peer import POLL_S, PeerLink
from transport.protocol import AggregatorInfo, LinkLost, ProtocolError, TransportError
from transport.transfer import Download, Upload

log = logging.getLogger(__name__)

DIRECT_FRAGMENT = (
    32 * 1024
)  # bytes at least: of 16 KiB the frames are 1.3 %, and several links share one line
DIAL_S = 2.0  # to be welcome at an owner's door
STILL_S = 10.0  # without anything new, either way
RESTS = 16  # rounds in which an owner that could not be reached is not tried again


class ShardClients:
    """Links by the name of an owner. `dial(owner)` makes one, which is not connected yet. Calls are made by
    one thread at a time."""

    def __init__(self, dial: Callable[[AggregatorInfo], PeerLink]) -> None:
        self._dial = dial
        self._links: dict[str, tuple[AggregatorInfo, PeerLink]] = {}
        self._rests: dict[str, int] = {}  # name -> round from which it is tried again
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="cocktail-direct")
        self._lock = threading.Lock()
        self._closed = (0, 0)  # bytes of links that are no more

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down, so far."""
        with self._lock:
            links = [link for _, link in self._links.values()]
        up, down = self._closed
        return up + sum(link.bytes_up for link in links), down + sum(link.bytes_down for link in links)

    def send(
        self,
        round: int,
        owners: Sequence[AggregatorInfo],
        parts: Mapping[str, bytes],
        enough: Callable[[], bool],
    ) -> dict[str, bytes]:
        """Bring each owner its part. Returns the parts that did not go this way. Ends early where `enough()`:
        the round is over without them."""
        for gone in self._links.keys() - {owner.name for owner in owners}:
            self._drop(gone)
        wanted = [o for o in owners if o.name in parts and o.address and self._rests.get(o.name, 0) <= round]
        sent = {o.name: self._threads.submit(self._put, o, round, parts[o.name]) for o in wanted}
        while not all(future.done() for future in sent.values()):
            if enough():
                for name, future in sent.items():
                    if not future.done():
                        self._rest(name, round)
                break
            time.sleep(POLL_S / 5)
        return {name: part for name, part in parts.items() if name not in sent or not self._went(sent[name])}

    def _went(self, future: Future[bool]) -> bool:
        return future.done() and future.result()

    def _put(self, owner: AggregatorInfo, round: int, part: bytes) -> bool:
        try:
            return self._link(owner).put(f"part/{round}", part, StallDetector().upload) is True
        except (TransportError, KeyError) as error:
            log.debug("to %s", owner.name, exc_info=error)
            self._rest(owner.name, round)
            return False

    def fetch(self, round: int, owners: Sequence[AggregatorInfo], most: int) -> dict[str, bytes]:
        """The packets of these owners' shards, of those where one of at most so many bytes could be had."""
        begun: dict[str, tuple[PeerLink, Download]] = {}
        for owner in owners:
            if owner.address and self._rests.get(owner.name, 0) <= round:
                try:
                    link = self._link(owner)
                    begun[owner.name] = link, link.begin(f"shard/{round}", most=most)
                except TransportError as error:
                    log.debug("to %s", owner.name, exc_info=error)
                    self._rest(owner.name, round)
        found = {}
        for name, (link, download) in begun.items():
            try:
                found[name] = link.finish(download, partial(StallDetector().download, download))
            except (TransportError, KeyError, ProtocolError) as error:
                log.debug("from %s", name, exc_info=error)
                self._rest(name, round)
        return found

    def _link(self, owner: AggregatorInfo) -> PeerLink:
        """The link to an owner, dialled anew where it was lost since the round before. Raises TransportError
        where there is none."""
        with self._lock:
            known, old = self._links.get(owner.name, (owner, None))
        if old is not None and not old.lost and (known.key, known.address) == (owner.key, owner.address):
            return old
        if old is not None:
            self._drop(owner.name)
        link = self._dial(owner)
        link.connect(DIAL_S, DIAL_S)  # a door may hear of a new member a little later than he of it
        with self._lock:
            self._links[owner.name] = owner, link
        return link

    def _rest(self, name: str, round: int) -> None:
        self._rests[name] = round + RESTS
        self._drop(name)

    def _drop(self, name: str) -> None:
        with self._lock:
            _, link = self._links.pop(name, (None, None))
            if link is not None:
                self._closed = self._closed[0] + link.bytes_up, self._closed[1] + link.bytes_down
        if link is not None:
            link.close()

    def close(self) -> None:
        for name in list(self._links):
            self._drop(name)
        self._threads.shutdown(wait=False)


class StallDetector:
    """Ends a wait for a transfer of which nothing was heard for STILL_S: an owner that is frozen, or behind a
    line that swallows everything."""

    def __init__(self) -> None:
        self.done, self.since = -1, 0.0

    def download(self, one: Download) -> None:
        self._look(one.name, one.received)

    def upload(self, one: Upload) -> None:
        self._look(one.name, len(one.todo))  # which the window lets go as answers come

    def _look(self, name: str, done: int) -> None:
        if done != self.done:
            self.done, self.since = done, time.monotonic()
        elif time.monotonic() - self.since > STILL_S:
            raise LinkLost(f"nothing was heard of {name} for {STILL_S:.0f} s")
