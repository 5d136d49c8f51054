"""A peer's half as an owner of shards: recipes' Owners as transport's Owning wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transport import PeerLink, RunURL
from transport.direct import DIAL_S, Direct
from transport.door import Door
from transport.errors import UpdateRejected
from transport.keys import CurveKeys
from transport.messages import Owner
from transport.sockets import RouterWire
from transport.url import parse_address

if TYPE_CHECKING:
    from recipes.schema import Recipe

Updates = Sequence[tuple[str, bytes, float]]


class Half:
    """Owns nothing until the hub says so. Its errors are in memory alone: who is killed costs them."""

    def __init__(self, recipe: Recipe, parameters: int) -> None:
        from recipes.owners import owners_of

        self.owners = owners_of(recipe, parameters, owned=())
        self.even = recipe.compression.weighting == "uniform"

    def own(self, shards: Sequence[int]) -> bytes:
        return self.owners.own(shards)

    def fits(self, size: int) -> None:
        self.owners.fits(size)

    def aggregate(self, round: int, updates: Updates) -> bytes:
        from recipes.aggregate import RejectedUpdate
        from recipes.owners import even

        try:
            return self.owners.aggregate(round, even(updates) if self.even else updates)
        except RejectedUpdate as error:
            raise UpdateRejected(error.peer, error.reason) from error

    def took(self, packet: bytes, ours: bytes) -> bool:
        return self.owners.part(packet) == ours

    def undo(self) -> None:
        self.owners.undo()

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        from recipes.aggregate import RejectedUpdate

        try:
            self.owners.inherit(peer, packet, share)
        except RejectedUpdate as error:
            raise UpdateRejected(error.peer, error.reason) from error


def open_door(host: str, port: int, keys: CurveKeys, url: RunURL) -> tuple[Door, int]:
    """The door at which the other members reach this peer, and its port. It opens to the hub, and to members
    once a round says who they are. Raises AddressInUse.
    """

    def knows(key: str) -> bool:
        return key == url.key or door.knows(key)

    wire = RouterWire(host, port, keys, allowed=knows)
    door = Door(wire, url.run)
    door.start()
    return door, wire.port


def to_owners(link: PeerLink, keys: CurveKeys) -> Direct:
    """This peer's links to owners, as itself."""

    def dial(owner: Owner) -> PeerLink:
        host, port = parse_address(owner.address)
        url = RunURL(owner.key, "", host, port, link.url.run)
        return PeerLink(url, link.name, keys=keys, patience=DIAL_S, flows=1, buckets=link.buckets)

    return Direct(dial)
