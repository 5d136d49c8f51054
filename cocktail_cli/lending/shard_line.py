"""A lent machine's own line to the hub, for the shards of its layers (a `recipes.staged_peer.ShardExchange`).

Its part of each update of its replica goes up there, and the same shards of the aggregate come down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from transport import PeerLink
from transport.protocol import SessionRenewed, messages, shard_ranges

SHORT = 16 * 1024  # bytes of a transfer that is mostly round trip, and tells nothing of the line


class ShardLine:
    """Exchanges shards in threads of its own, one for each round in flight.

    Args:
        allowed: whether the hub takes updates in parts from this machine now.
    """

    def __init__(self, link: PeerLink, allowed: Callable[[], bool]) -> None:
        self._link, self._allowed = link, allowed
        self._up = self._down = 0
        self._rounds: dict[int, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(messages.MOST_IN_FLIGHT, thread_name_prefix="shard-line")

    @property
    def on(self) -> bool:
        return self._allowed()

    @property
    def rates(self) -> tuple[int, int]:
        return self._up, self._down

    def send(self, round: int, packet: bytes, shards: Sequence[int]) -> None:
        kept = {r: one for r, one in self._rounds.items() if r > round - messages.MOST_IN_FLIGHT}
        self._rounds = kept | {round: self._threads.submit(self._exchange, round, packet, shards)}

    def fetch(self, round: int) -> bytes:
        return self._rounds[round].result()

    def close(self) -> None:
        """Begin no other exchange; those under way end with the link."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _exchange(self, round: int, packet: bytes, shards: Sequence[int]) -> bytes:
        """Send a part, wait until its round is durable, and fetch the same shards of the aggregate."""
        while True:
            try:
                if took := self._link.deliver(round, packet):
                    self._up = rate_of(len(packet), took, self._up)
                began = time.monotonic()
                found = self._link.fetch(f"packet/{round}/{shard_ranges(shards)}")
            except SessionRenewed:  # the hub was restarted, or has lost sight of this machine
                continue
            self._down = rate_of(len(found), time.monotonic() - began, self._down)
            return found


def rate_of(size: int, seconds: float, known: int) -> int:
    """Return bytes a second of a transfer; of a short one, where it is more than what is known."""
    rate = int(size / max(seconds, 1e-3))
    return max(rate, known) if size < SHORT else rate
