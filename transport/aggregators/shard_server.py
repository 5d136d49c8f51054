"""Members of a round upload their parts at an aggregator's port, and fetch the packet of its shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from transport.direct import Fragment, PeerServer, Uploads
from transport.protocol import PART, SHARD, messages, round_of
from transport.transfer import ObjectSource, memory_source

KEPT = 5  # rounds whose packet is served: members may have four in flight
MEMBERS = "members"  # of the round


class ShardServer:
    """Takes the parts of an aggregator, and serves its packets. Members are set later, assignment by
    assignment; `on_part` is called in the server's thread."""

    def __init__(self, server: PeerServer, on_part: Callable[[int, str, bytes], None]) -> None:
        self._server, self._on_part = server, on_part
        self._round = self._limit = 0  # parts of earlier rounds are refused, and parts of more bytes
        self._served: dict[int, ObjectSource] = {}  # round -> the packet of the shards
        server.uploads = Uploads(self._refusal, self._took)
        server.serve(SHARD, self._read, MEMBERS)

    def opened(self, round: int, members: Mapping[str, str], limit: int) -> None:
        """Accept parts of this round, of `limit` bytes at most, from `members`: name -> key."""
        self._round, self._limit = round, limit
        self._server.admit(MEMBERS, members)

    def serve(self, round: int, packet: bytes) -> None:
        """Serve the packet of this round."""
        kept = {r: source for r, source in self._served.items() if round - KEPT < r < round}
        self._served = kept | {round: memory_source(packet)}

    def _refusal(self, member: str, name: str, size: int) -> str | None:
        round = round_of(PART, name)
        # the aggregator may learn of a round late
        if round is None or not self._round <= round <= self._round + 1:
            return f"{name!r} is not wanted here, or not any more"
        return f"a part of {size} bytes, the longest has {self._limit}" if size > self._limit else None

    def _took(self, member: str, name: str, part: bytes) -> None:
        round = round_of(PART, name)
        assert round is not None, "`_refusal` let no other in"
        self._on_part(round, member, part)

    def _read(self, member: str, m: messages.Get) -> Fragment:
        round = round_of(SHARD, m.name)
        if round is None or (source := self._served.get(round)) is None:
            raise KeyError(f"{m.name} is not served here, or not any more")
        return Fragment(source.read(m.index, m.chunk), source.size, source.sha256)
