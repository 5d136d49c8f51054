"""A peer's part of a standby: it looks for the run there if the hub is lost."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import msgspec

from cocktail_cli.assembly import PeerExtension
from transport.peer import Elsewhere
from transport.protocol import read_msgpack

from .bodies import NAME, Backs, Standby


class Link(Protocol):
    """A link to the hub (`transport.PeerLink`)."""

    elsewhere: Elsewhere | None

    def say(self, name: str, body: bytes) -> None: ...


class StandbyPeer(PeerExtension):
    """Dialling the standby is this peer's vote for it."""

    name = NAME

    def __init__(self, link: Link) -> None:
        self._link = link
        self.voted = 0  # number of the standby that this peer has dialled

    def received(self, body: bytes) -> None:
        """Note where the standby is; or promise not to vote for it, unless that is done."""
        said = read_msgpack(body, Standby, "where the hub says that its standby is")
        if said.place:
            self._link.elsewhere = Elsewhere(said.place, said.key, partial(self._vote, said.number))
        elif self.voted < said.number:
            self._link.elsewhere = None
            self._link.say(NAME, msgspec.msgpack.encode(Backs(said.number)))

    def _vote(self, number: int) -> None:
        self.voted = number
