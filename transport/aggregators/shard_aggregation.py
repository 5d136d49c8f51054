"""The part of the hub's shell that has to do with owners that are peers: what lies here for them, and how a
round's packet is put together.

Of the methods each says whose thread it belongs to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from transport import actions as do
from transport.ledger import HUB, Deliveries, Ledger, PendingHandoff, merge_deliveries
from transport.protocol import (
    ERROR,
    PART,
    SHARD,
    CurveKeys,
    HubDelegate,
    ShardPacket,
    UpdateRejected,
    WeightedPacket,
    round_and_name,
    round_of,
)
from transport.scheduling import owner_called
from transport.transfer import ChunkBuffer, CompletedUpload
from transport.wire import is_reachable

from . import shard_coordinator
from .shard_assignment import digest_of, short
from .shard_barrier import Gather, Unmoved

if TYPE_CHECKING:
    from transport.hub import HubState


class HubShards:
    """Of one hub. `tell` and `later` have the I/O thread and the commit thread do something; `warn` tells the
    owner of the run."""

    def __init__(
        self,
        state: HubState,
        ledger: Ledger,
        work: HubDelegate,
        tell: Callable[[Callable[[], list[do.Action]]], None],
        later: Callable[[Callable[[], object]], None],
        warn: Callable[[str, str], None],
        keys: CurveKeys,  # of the hub: doors know them
    ) -> None:
        self.state, self.ledger, self.work, self.keys = state, ledger, work, keys
        self._tell_hub, self.later, self.warn = tell, later, warn
        self.kept: dict[tuple[int, str], bytes] = {}  # (round, owner, "": we) -> its packet
        self.gather = Gather(state.settings.peer_timeout)
        self.moved: dict[str, str] = {}  # session -> digest of its packet, which is in the newest aggregate
        self.parts: dict[
            tuple[int, str, str], ChunkBuffer
        ] = {}  # (round, owner, member) -> for an owner to fetch
        # Estates that are in the hub's errors since a round was committed, and with the next one on the disk.
        self._inherited: dict[int, tuple[int, ...]] = {}

    def _tell(self, fact: Callable[[HubState], None]) -> None:
        """From any thread."""
        self._tell_hub(lambda: self.state.about_owners(fact, time.monotonic()))

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def arrived(self, upload: CompletedUpload, now: float) -> list[do.Action]:
        """An upload of a member for an owner, or of an owner."""
        session, ex = upload.session, self.state.exchange
        if (part := round_and_name(PART, upload.name)) is not None and ex is not None:
            round, owner = part[0], owner_called(ex, part[1])
            if owner is not None and round == ex.round:
                self.parts[round, owner, session] = upload.parts
                digest = short(upload.parts.sha256)
                return self.state.about_owners(
                    lambda hub: shard_coordinator.part_uploaded(hub, session, owner, round, digest, now), now
                )
        elif (shard := round_and_name(SHARD, upload.name)) is not None:
            self.gather.came(session, int(shard[1]), upload.parts)
        elif round_of(ERROR, upload.name) is not None:
            self._hand_over(session, upload.parts)
        return []

    def _hand_over(self, session_id: str, parts: ChunkBuffer) -> None:
        session = self.state.members.get(session_id)
        if session is not None:
            session.handing, name, shards = True, session.name, frozenset(session.owned)
            self.later(lambda: self._take_over(session_id, name, shards, parts.data()))

    def opened(self, round: int) -> None:
        """What was for rounds before is not fetched any more."""
        self.parts = {key: parts for key, parts in self.parts.items() if key[0] >= round}

    def act(self, action: do.Reach | do.Unusable | do.LoseOwner) -> None:
        if isinstance(action, do.Reach):
            self._reach(action)
        elif isinstance(action, do.Unusable):
            self.gather.refuse(action.owner, action.attempt, action.peer, action.reason)
        else:
            self.gather.lose(action.session, "it is gone or silent")

    def _reach(self, action: do.Reach) -> None:
        """Dial a door, in a thread of its own: seconds pass until it is clear that nobody answers."""

        def look() -> None:
            ok = is_reachable(action.address, action.key, self.keys)
            self._tell(lambda hub: shard_coordinator.reached(hub, action.session, ok))

        threading.Thread(target=look, name="cocktail-reach", daemon=True).start()

    # ---- the reader thread ---------------------------------------------------------------------------------

    def find(self, session: str, name: str) -> bytes:
        """What an owner may fetch. Reads one entry of a dict or two. Raises KeyError."""
        if (part := round_and_name(PART, name)) is not None and (ex := self.state.exchange) is not None:
            member = next((s for s, called in ex.members.items() if called == part[1]), "")
            if (parts := self.parts.get((part[0], session, member))) is not None:
                return parts.data()
        shard = round_and_name(SHARD, name) or (round_of(SHARD, name), "")
        if shard[0] is not None and (packet := self.kept.get((shard[0], shard[1]))) is not None:
            return packet
        number = round_of("estate/", name)
        if number is not None:
            return self.ledger.estates.packet(number)
        raise KeyError(f"there is no {name} for this session")

    # ---- the commit thread ---------------------------------------------------------------------------------

    def own(self, round: int, shards: Sequence[int]) -> None:
        """The hub owns these from now on; what it had of others is theirs."""
        if self.state.settings.owners == "peers":
            others = frozenset(range(self.state.settings.shards)) - set(shards)
            if self.work.own(
                round, shards, lambda errors: self._keep(PendingHandoff(HUB, 1.0, others), errors)
            ):
                self.ledger.estates.strike(self._inherited)
                self._inherited = {}

    def _keep(self, left: PendingHandoff, packet: bytes) -> int:
        """For owners to fetch, also from a hub that was killed. Its number."""
        number = self.ledger.estates.keep(left, packet)
        self._tell(lambda hub: shard_coordinator.left(hub, number, left))
        return number

    def keep_legacy(self, action: do.Inherit, parts: ChunkBuffer) -> None:
        """For all owners, the hub too."""
        everything = frozenset(range(self.state.settings.shards))
        self._keep(PendingHandoff(action.peer, action.share, everything), parts.data())

    def _take_over(self, session: str, peer: str, owned: Collection[int], packet: bytes) -> None:
        """The errors of shards that this peer owned, and nothing else that it may have put into it."""
        try:
            packet, shards = self.work.restricted(peer, packet, owned)
        except UpdateRejected as error:
            self.warn(peer, f"the errors of its shards cannot be used: {error.reason}")
            shards = []
        if shards:
            self._keep(PendingHandoff(peer, 1.0, frozenset(shards)), packet)
        self._tell(lambda hub: shard_coordinator.error_taken(hub, session, shards))

    def aggregate(self, action: do.Commit, updates: Sequence[WeightedPacket]) -> bytes:
        """The packet of all shards. Raises UpdateRejected where a peer's packet cannot be used, Unmoved."""
        if self.state.settings.owners == "hub":
            return self.work.aggregate(action.round, updates)
        weights = {peer: weight for peer, _, weight in updates}
        attempt = self.gather.ask(action.owners)
        if action.owners:
            self._tell(lambda hub: shard_coordinator.close(hub, action.round, attempt, weights))
        came = self.gather.wait()
        own = self.work.aggregate(action.round, updates)
        while came or action.hubs:
            parts = [
                ShardPacket(owner, action.owners[owner].shards, packet)
                for owner, packet in sorted(came.items())
            ]
            try:
                packet = self.work.joined(action.round, action.hubs, own, parts)
                self._keep_packets(action, own, came)
                # an owner that is lost from now on has done its part
                self.moved = {owner: digest_of(packet) for owner, packet in came.items()}
                return packet
            except UpdateRejected as error:
                if came.pop(error.peer, None) is None:
                    raise
                self.gather.lose(error.peer, error.reason)
        raise Unmoved

    def _keep_packets(self, action: do.Commit, own: bytes, came: Mapping[str, bytes]) -> None:
        """For those who put the round's packet together from its owners'."""
        kept = {key: packet for key, packet in self.kept.items() if key[0] == action.round - 1}
        kept |= {(action.round, action.owners[owner].name): packet for owner, packet in came.items()}
        self.kept = kept | ({(action.round, ""): own} if action.hubs else {})

    def given(self) -> Deliveries:
        """What is in errors on the disk once the newest aggregate is committed."""
        ex = self.state.exchange
        return merge_deliveries(
            self._inherited, shard_coordinator.given_to(ex, self.moved) if ex is not None else {}
        )

    def committed(self, action: do.Commit) -> None:
        """What was left to the hub's shards is added to their errors, as owners that are peers do now too."""
        self._inherited = {estate.number: action.hubs for estate in action.estates}
        for estate in action.estates:
            try:
                self.work.inherit(estate.peer, self.ledger.estates.packet(estate.number), estate.share)
            except UpdateRejected as error:
                self.warn(error.peer, f"what it left cannot be used: {error.reason}")
