"""A hub's delegate that does no arithmetic, for measurements and tests of the transport alone."""

from __future__ import annotations

from collections.abc import Sequence

from transport.protocol import WeightedPacket

TOKENS = 10  # of each sample


class IdleDelegate:
    """A hub's delegate that does no arithmetic: the first packet is the aggregate."""

    def samples(self, ids: Sequence[int]) -> bytes:
        return bytes(4096)

    def tokens(self, ids: Sequence[int]) -> int:
        return TOKENS * len(ids)

    def weight(self, ids: Sequence[int]) -> float:
        return float(self.tokens(ids))

    def opens(self, size: int, rung: int) -> None:
        """Do nothing: a packet is as long as its peer makes it."""

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Ignore it until the round closes."""

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        return updates[0].packet

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Drop it."""

    def committed(self, round: int, packet: bytes) -> None:
        """Keep no model."""

    def fingerprint(self, round: int) -> int:
        return 7

    def object(self, name: str) -> bytes:
        raise KeyError(name)
