"""A lent machine's own line to the hub, for the shards of its layers (a `recipes.staged_peer.ShardExchange`).

Its part of each update of its replica goes up there, and the same shards of the aggregate come down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

from transport import PeerLink
from transport.protocol import SessionRenewed, messages, shard_ranges
from transport.transfer import measured


class ShardLine:
    """Exchanges shards in threads of its own, one for each round in flight.

    Args:
        allowed: whether the hub takes updates in parts from this machine now.
    """

    def __init__(self, link: PeerLink, allowed: Callable[[], bool]) -> None:
        self._link, self._allowed = link, allowed
        self._ups: tuple[float, ...] = ()  # bytes a second
        self._downs: tuple[float, ...] = ()
        self._rounds: dict[int, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(messages.MOST_IN_FLIGHT, thread_name_prefix="shard-line")

    @property
    def on(self) -> bool:
        return self._allowed()

    @property
    def rates(self) -> tuple[int, int]:
        up, down = (median(rates) if rates else 0 for rates in (self._ups, self._downs))
        return int(up), int(down)

    def send(self, round: int, packet: bytes, shards: Sequence[int], most: int) -> None:
        kept = {r: one for r, one in self._rounds.items() if r > round - messages.MOST_IN_FLIGHT}
        self._rounds = kept | {round: self._threads.submit(self._exchange, round, packet, shards, most)}

    def fetch(self, round: int) -> bytes:
        return self._rounds[round].result()

    def close(self) -> None:
        """Begin no other exchange; those under way end with the link."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _exchange(self, round: int, packet: bytes, shards: Sequence[int], most: int) -> bytes:
        """Send a part, wait until its round is durable, and fetch the same shards of the aggregate.

        most: bytes that they can have.
        """
        while True:
            try:
                if took := self._link.deliver(round, packet):
                    self._ups = measured(self._ups, len(packet), took)
                began = time.monotonic()
                found = self._link.fetch(f"packet/{round}/{shard_ranges(shards)}", most)
            except SessionRenewed:  # the hub was restarted, or has lost sight of this machine
                continue
            self._downs = measured(self._downs, len(found), time.monotonic() - began)
            return found
