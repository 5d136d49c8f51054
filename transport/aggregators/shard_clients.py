"""A member's connections to the shard servers of aggregators: parts go up, packets of shards come down.

What fails here goes through the hub: an aggregator that cannot be reached is not tried again for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from transport.peer import POLL_S, PeerLink
from transport.protocol import LinkLost, ProtocolError, TransportError, messages
from transport.transfer import Download, Upload

log = logging.getLogger(__name__)

DIRECT_FRAGMENT = 32 * 1024  # bytes at least: framing is 1.3 % of 16 KiB, and several links share one line
DIAL_S = 2.0  # to be welcomed by a shard server
STILL_S = 10.0  # without progress, in either direction
RESTS = 16  # rounds in which an unreachable aggregator is not tried again


class ShardClients:
    """Links by the name of an aggregator; `dial` makes an unconnected one. One thread at a time may call."""

    def __init__(self, dial: Callable[[messages.AggregatorInfo], PeerLink]) -> None:
        self._dial = dial
        self._links: dict[str, tuple[messages.AggregatorInfo, PeerLink]] = {}
        self._rests: dict[str, int] = {}  # name -> first round in which it is tried again
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="cocktail-direct")
        self._lock = threading.Lock()
        self._closed = (0, 0)  # bytes up and down of closed links

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        with self._lock:
            links = [link for _, link in self._links.values()]
        up, down = self._closed
        return up + sum(link.bytes_up for link in links), down + sum(link.bytes_down for link in links)

    def send(
        self,
        round: int,
        aggregators: Sequence[messages.AggregatorInfo],
        parts: Mapping[str, bytes],
        enough: Callable[[], bool],
    ) -> dict[str, bytes]:
        """Upload each aggregator its part until `enough()`; return the parts that did not arrive."""
        for gone in self._links.keys() - {aggregator.name for aggregator in aggregators}:
            self._drop(gone)
        wanted = [a for a in self._reachable(aggregators, round) if a.name in parts]
        sent = {a.name: self._threads.submit(self._put, a, round, parts[a.name]) for a in wanted}
        while not all(future.done() for future in sent.values()):
            if enough():
                for name, future in sent.items():
                    if not future.done():
                        self._rest(name, round)
                break
            time.sleep(POLL_S / 5)
        went = {name for name, future in sent.items() if future.done() and future.result()}
        return {name: part for name, part in parts.items() if name not in went}

    def _put(self, aggregator: messages.AggregatorInfo, round: int, part: bytes) -> bool:
        try:
            return self._link(aggregator).put(f"part/{round}", part, StallDetector().upload) is True
        except (TransportError, KeyError) as error:
            log.debug("to %s", aggregator.name, exc_info=error)
            self._rest(aggregator.name, round)
            return False

    def fetch(
        self, round: int, aggregators: Sequence[messages.AggregatorInfo], most: int
    ) -> dict[str, bytes]:
        """Fetch the packets of these aggregators' shards, each of at most `most` bytes; skip failed ones."""
        begun: dict[str, tuple[PeerLink, Download]] = {}
        for aggregator in self._reachable(aggregators, round):
            try:
                link = self._link(aggregator)
                begun[aggregator.name] = link, link.begin(f"shard/{round}", most=most)
            except TransportError as error:
                log.debug("to %s", aggregator.name, exc_info=error)
                self._rest(aggregator.name, round)
        found = {}
        for name, (link, download) in begun.items():
            try:
                found[name] = link.finish(download, partial(StallDetector().download, download))
            except (TransportError, KeyError, ProtocolError) as error:
                log.debug("from %s", name, exc_info=error)
                self._rest(name, round)
        return found

    def _reachable(
        self, aggregators: Sequence[messages.AggregatorInfo], round: int
    ) -> list[messages.AggregatorInfo]:
        return [a for a in aggregators if a.address and self._rests.get(a.name, 0) <= round]

    def _link(self, aggregator: messages.AggregatorInfo) -> PeerLink:
        """Return the link to an aggregator, redialled if it was lost. Raises TransportError."""
        with self._lock:
            known, old = self._links.get(aggregator.name, (aggregator, None))
        moved = (known.key, known.address) != (aggregator.key, aggregator.address)
        if old is not None and not old.lost and not moved:
            return old
        if old is not None:
            self._drop(aggregator.name)
        link = self._dial(aggregator)
        link.connect(DIAL_S, DIAL_S)  # the server may learn of a new member later than the member of it
        with self._lock:
            self._links[aggregator.name] = aggregator, link
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
    """Ends the wait for a transfer without progress for STILL_S: the aggregator, or its line, is dead."""

    def __init__(self) -> None:
        self.done, self.since = -1, 0.0

    def download(self, one: Download) -> None:
        self._look(one.name, one.received)

    def upload(self, one: Upload) -> None:
        self._look(one.name, len(one.todo))  # it shrinks as answers arrive

    def _look(self, name: str, done: int) -> None:
        if done != self.done:
            self.done, self.since = done, time.monotonic()
        elif time.monotonic() - self.since > STILL_S:
            raise LinkLost(f"nothing was heard of {name} for {STILL_S:.0f} s")
