"""A standby: a second machine that follows the ledger of a run, and takes over when the hub is lost."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from cocktail_cli.assembly import Extension, HostParts, PeerExtension, PeerParts

if TYPE_CHECKING:
    from transport import PeerLink
    from transport.hub import Extend
    from transport.peer import Elsewhere

    from .hub import Replication


class Link(Protocol):
    """A link to the hub (`transport.PeerLink`)."""

    elsewhere: Elsewhere | None

    def say(self, name: str, body: bytes) -> None: ...


class StandbyPeer(PeerExtension):
    """Dialling the standby is this peer's vote for it."""

    name = "standby"

    def __init__(self, link: Link) -> None:
        self._link = link
        self.voted = 0  # number of the standby that this peer has dialled

    def received(self, body: bytes) -> None:
        """Note where the standby is; or promise not to vote for it, unless that is done."""
        import msgspec

        from transport.peer import Elsewhere
        from transport.protocol import read_msgpack

        from .bodies import Backs, Standby

        said = read_msgpack(body, Standby, "where the hub says that its standby is")
        if said.place:
            self._link.elsewhere = Elsewhere(said.place, said.key, partial(self._vote, said.number))
        elif self.voted < said.number:
            self._link.elsewhere = None
            self._link.say(self.name, msgspec.msgpack.encode(Backs(said.number)))

    def _vote(self, number: int) -> None:
        self.voted = number


class StandingBy(Extension):
    """The hub announces a round once the standby has it; peers look for the run there if the hub is lost."""

    def hub(self, host: HostParts) -> Extend:
        """Feed a standby from when one comes; where the run must have one, from the beginning."""
        from transport.hub import HubParts, Late

        from .keys import lag_of

        lag, name = lag_of(host.recipe), StandbyPeer.name

        def begin(hub: HubParts) -> Replication:
            from .hub import Replication
            from .hub_process import HubProcess, ReplicaFiles

            files = ReplicaFiles(host.work, host.ledger.folder).object
            refuses = "" if host.recipe.hub_sums else "a run whose peers aggregate shards has no standby"
            return Replication(hub, lag, HubProcess(host.keys, host.ledger, files), refuses)

        return begin if lag == 0 or host.ledger.noted(name) else Late(name, begin)

    def peer(self, peer: PeerParts) -> StandbyPeer:
        return self.line(peer.link)

    def line(self, link: PeerLink) -> StandbyPeer:
        return StandbyPeer(link)


extension = StandingBy()
