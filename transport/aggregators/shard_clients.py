"""A member's connections to the shard servers of aggregators: parts go up, packets of shards come down.

What fails here goes through the hub: an aggregator that cannot be reached is not tried again for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from transport.direct import DirectLinks, ReachablePeer, StallDetector
from transport.peer import POLL_S, PeerLink
from transport.protocol import ProtocolError, TransportError, messages
from transport.transfer import Download

log = logging.getLogger(__name__)

RESTS = 16  # rounds in which an unreachable aggregator is not tried again


class ShardClients:
    """Exchanges parts and packets with aggregators; `dial` makes a link. One thread may send while another
    fetches."""

    def __init__(self, dial: Callable[[ReachablePeer], PeerLink]) -> None:
        self._links = DirectLinks(dial)
        self._rests: dict[str, int] = {}  # name -> first round in which it is tried again
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="cocktail-direct")

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        return self._links.traffic

    def send(
        self,
        round: int,
        aggregators: Sequence[messages.AggregatorInfo],
        parts: Mapping[str, bytes],
        enough: Callable[[], bool],
    ) -> dict[str, bytes]:
        """Upload each aggregator its part until `enough()`; return the parts that did not arrive."""
        self._links.keep({aggregator.name for aggregator in aggregators})
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
            return self._links.to(aggregator).put(f"part/{round}", part, StallDetector().upload) is True
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
                link = self._links.to(aggregator)
                begun[aggregator.name] = link, link.begin(f"shard/{round}", most)
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

    def _rest(self, name: str, round: int) -> None:
        self._rests[name] = round + RESTS
        self._links.drop(name)

    def close(self) -> None:
        self._links.close()
        self._threads.shutdown(wait=False)
