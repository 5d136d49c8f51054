"""HubDelegate: what the hub leaves to its caller, and the values that pass between the two."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class WeightedPacket(NamedTuple):
    """One peer's packet and its weight in the mean; of a handoff, its share of the mean."""

    peer: str
    packet: bytes
    weight: float


class ShardPacket(NamedTuple):
    """The packet that an aggregator has made of its shards."""

    aggregator: str
    shards: Sequence[int]
    packet: bytes


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

    def own(self, round: int, shards: Sequence[int], keep: Callable[[bytes], int]) -> bool:
        """Aggregate exactly these shards from this round on.

        The error feedback of shards given up is passed to `keep`, which stores it for their next aggregators
        and returns its number; it is dropped here only after that. Returns False where nothing has changed.
        Called only where peers may aggregate, as are `joined` and `restricted`.
        """

    def fits(self, size: int) -> None:
        """Limit the next aggregates to `size` bytes, which all members can fetch beside their compute."""

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """Aggregate the hub's shards: one packet from the updates, which are sorted by peer.

        Raises UpdateRejected, before any state has changed; it is called again without that peer.
        """

    def joined(self, round: int, hubs: Sequence[int], own: bytes, parts: Sequence[ShardPacket]) -> bytes:
        """Join `own`, the packet of the hub's shards `hubs`, and the aggregators' packets into one of all
        shards. Raises UpdateRejected, whose `peer` is the `aggregator` at fault."""

    def restricted(self, peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
        """Return a peer's packet of these shards only, and the ones that it moves. Raises UpdateRejected."""

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
