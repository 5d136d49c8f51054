"""A standby: a second machine that follows the ledger of a run, and takes over when the hub is lost."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cocktail_cli.assembly import Extension, HostParts, PeerParts

if TYPE_CHECKING:
    from transport import PeerLink
    from transport.hub import Extend

    from .peer import StandbyPeer


class StandingBy(Extension):
    """The hub announces a round once the standby has it; peers look for the run there if the hub is lost."""

    def hub(self, host: HostParts) -> Extend:
        from .hub import Replication
        from .hub_process import HubProcess
        from .keys import lag_of
        from .replica_files import ReplicaFiles

        process = HubProcess(host.keys, host.ledger, ReplicaFiles(host.work, host.ledger.folder).object)
        return partial(Replication, lag=lag_of(host.recipe), process=process)

    def peer(self, peer: PeerParts) -> StandbyPeer:
        return self.line(peer.link)

    def line(self, link: PeerLink) -> StandbyPeer:
        from .peer import StandbyPeer

        return StandbyPeer(link)


extension = StandingBy()
