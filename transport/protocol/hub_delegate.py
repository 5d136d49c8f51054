"""HubDelegate: what the hub leaves to its caller, and the values that pass between the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class WeightedPacket(NamedTuple):
    """One peer's packet and its weight in the mean; of a handoff, its share of the mean."""

    peer: str
    packet: bytes
    weight: float


class HubDelegate(Protocol):
    """The model side of a run, implemented by the hub's caller.

    Threads: `samples` and `object` run in the reader thread, `arrived` in several, all others in the commit
    thread; none in the thread that does the I/O.
    """

    def samples(self, ids: Sequence[int]) -> bytes:
        """Return the payload of a lease: opaque here."""

    def tokens(self, ids: Sequence[int]) -> int:
        """Count the trained tokens of these samples."""

    def weight(self, ids: Sequence[int]) -> float:
        """Return the weight of the update that delivers these samples; 0: it delivers no work."""

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Take an update that has arrived, to decode it before the round closes.

        `aggregate` gets this very object later, unless the update came too late. Only `aggregate` may refuse
        a packet.
        """

    def fits(self, size: int) -> None:
        """Limit the next aggregates to `size` bytes, which all members can fetch beside their compute."""

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """Aggregate: one packet from the updates, which are sorted by peer.

        Raises UpdateRejected, before any state has changed; it is called again without that peer.
        """

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Merge a residual handoff into the error feedback; `share` is the peer's share of the mean. It goes
        out with the rounds aggregated from now on. Raises UpdateRejected, with nothing changed."""

    def committed(self, round: int, packet: bytes) -> None:
        """Note that `packet`, as aggregated, is durable."""

    def fingerprint(self, round: int) -> int:
        """Compute the fingerprint of the global model of `round` by folding the ledger, slowly."""

    def object(self, name: str) -> bytes | Path:
        """Return the object "base/<file>", "snapshot/<round>/model.safetensors", "hashes/<either>" or "eval".
        Raises KeyError where there is none such."""
