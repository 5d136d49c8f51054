"""The model side of an inner hub, which its caller brings, and the values that pass between the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transport.protocol import WeightedPacket


class LeasedSample(NamedTuple):
    """One sample of a lease of the parent. Its data are opaque here."""

    data: Any
    tokens: int  # trained ones
    weight: float  # in the mean


class SentUpdate(NamedTuple):
    """The packet C[d_h] of a round, which the parent may or may not have."""

    round: int
    packet: bytes
    sender: str  # the inner hub's name at its parent
    peers: tuple[str, ...]  # whose updates are in d_h since
    accepted: bool | None = None  # None: only the parent knows


class InnerResidual(Protocol):
    """The residual d_h of an inner hub, durable: what its children have sent and its parent has not taken.

        aggregate   d_h <- d_h + D_h, D_h = sum_i w_i C[d_i];  returns C[d_h], durable
        settle      accepted: d_h <- d_h - C[d_h];  else it stays; durable, too

    Threads: as HubDelegate's methods of the same names; `settle` runs in the commit thread.
    """

    @property
    def pending(self) -> SentUpdate | None:
        """The newest update of before a crash, if its round is not in this hub's ledger."""

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Take an update that has arrived, to decode it before the round closes."""

    def fits(self, size: int) -> None:
        """Limit the next packets to `size` bytes."""

    def aggregate(self, round: int, updates: Sequence[WeightedPacket], sender: str) -> bytes:
        """Add the updates, sorted by peer, to d_h, and return C[d_h]. Raises UpdateRejected, with nothing
        changed; it is called again without that peer."""

    def settle(self, accepted: bool) -> None:
        """Take the newest packet from d_h if the parent has accepted it."""

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Merge a residual handoff into d_h. Raises UpdateRejected, with nothing changed."""

    def committed(self, round: int) -> None:
        """Note that a round is durable in this hub's ledger."""


class InnerWork(Protocol):
    """The model side of an inner hub: its residual, and the samples of a lease."""

    @property
    def residual(self) -> InnerResidual:
        """The residual d_h."""

    def unpack(self, lease: bytes) -> Sequence[LeasedSample]:
        """Cut the parent's lease into its samples."""

    def pack(self, samples: Sequence[LeasedSample]) -> bytes:
        """Return the payload of a peer's lease."""

    def fingerprint(self, round: int) -> int:
        """Compute the fingerprint of the global model of `round` by folding the ledger, slowly."""

    def object(self, name: str) -> bytes | Path:
        """Return an object as HubDelegate does. Raises KeyError where there is none such."""
