"""The hub's shell for shards that peers aggregate: it relays parts, and joins a round's packet from theirs.

Sections name the thread that calls their methods.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from transport import actions as do
from transport.actions import Shell
from transport.ledger import HUB, Deliveries, Ledger, PendingHandoff, merge_deliveries
from transport.protocol import (
    ERROR,
    PART,
    SHARD,
    Cost,
    HubDelegate,
    ObjectKind,
    ShardPacket,
    UpdateRejected,
    WeightedPacket,
    round_and_name,
    round_of,
)
from transport.transfer import ChunkBuffer, CompletedUpload, ObjectSource, ObjectStore, memory_source

from .shard_assignment import digest_of, short
from .shard_barrier import ShardBarrier
from .shard_coordinator import ShardCoordinator, merged_by

MADE = 256  # objects cached
NOT_HERE = "it is not here for this session"
RELAYED_PART = ObjectKind("part/<round>/<peer>", ("peer",), "a part of a packet", Cost.ROUND)
SHARD_PACKET = ObjectKind("shard/<round>/<owner>", ("peer",), "a part of a packet", Cost.ROUND)
OWN_SHARDS = ObjectKind("shard/<round>", ("peer",), "a part of a packet", Cost.ROUND)
HANDED_OVER = ObjectKind("estate/<number>", ("peer",), "a part of a handoff", Cost.MADE)


class ShardAggregation:
    """I/O of one hub for its shard aggregators."""

    def __init__(
        self,
        coordinator: ShardCoordinator,
        ledger: Ledger,
        delegate: HubDelegate,
        shell: Shell,
    ) -> None:
        self._coordinator, self._shell = coordinator, shell
        self._ledger, self._delegate = ledger, delegate
        self._packets: dict[tuple[int, str], bytes] = {}  # (round, aggregator; "": the hub) -> its packet
        self.barrier = ShardBarrier(coordinator.settings.peer_timeout)
        self.moved: dict[str, str] = {}  # session -> digest of its packet in the newest aggregate
        self._parts: dict[tuple[int, str, str], ChunkBuffer] = {}  # (round, aggregator, member)
        # Handoffs in the hub's error feedback since a round was committed, and on disk with the next one.
        self._merged: dict[int, tuple[int, ...]] = {}
        self._made: OrderedDict[tuple[str, str], ObjectSource] = OrderedDict()  # by session and name

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def arrived(self, upload: CompletedUpload, now: float) -> None:
        """Take an upload of a member for an aggregator, or of an aggregator."""
        session, ex = upload.session, self._coordinator.exchange
        if (part := round_and_name(PART, upload.name)) is not None and ex is not None:
            round, aggregator = part[0], ex.aggregator_named(part[1])
            if aggregator is not None and round == ex.round:
                self._parts[round, aggregator, session] = upload.parts
                digest = short(upload.parts.sha256)
                self._coordinator.part_uploaded(session, aggregator, round, digest, now)
        elif (shard := round_and_name(SHARD, upload.name)) is not None:
            self.barrier.came(session, int(shard[1]), upload.parts)
        elif round_of(ERROR, upload.name) is not None:
            sender = self._coordinator.receiving(session)
            if sender is not None:
                name, shards, packet = sender.name, frozenset(sender.aggregated), upload.parts
                self._shell.later(lambda: self._store_error_feedback(session, name, shards, packet.data()))

    def opened(self, round: int) -> None:
        """Drop the parts of rounds before this one."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] >= round}

    def reject_part(self, action: do.RejectPart) -> None:
        self.barrier.refuse(action.aggregator, action.attempt, action.peer, action.reason)

    def lose_aggregator(self, action: do.LoseAggregator) -> None:
        self.barrier.lose(action.session, "it is gone or silent")

    # ---- the reader thread ---------------------------------------------------------------------------------

    def serve(self, store: ObjectStore) -> None:
        """Add the rows of what aggregators and members fetch."""
        for kind, find in (
            (RELAYED_PART, self._part),
            (SHARD_PACKET, self._shard),
            (OWN_SHARDS, self._shard),
            (HANDED_OVER, self._handoff),
        ):
            store.serve(kind, self._cached(find))

    def _cached(
        self, find: Callable[[str, tuple[str, ...]], bytes]
    ) -> Callable[[str, str, tuple[str, ...]], ObjectSource]:
        def cached(session: str, name: str, of: tuple[str, ...]) -> ObjectSource:
            if (session, name) not in self._made:
                self._made[session, name] = memory_source(find(session, of))
                if len(self._made) > MADE:
                    self._made.popitem(last=False)
            return self._made[session, name]

        return cached

    def forget_made(self) -> None:
        """Forget the parts of the round before: the new ones may have the same names."""
        self._made.clear()

    def _part(self, session: str, of: tuple[str, ...]) -> bytes:
        """Return a member's part for the aggregator that asks. Raises KeyError, as do the next two."""
        ex = self._coordinator.exchange
        member = next((s for s, called in ex.members.items() if called == of[1]), "") if ex else ""
        if (parts := self._parts.get((int(of[0]), session, member))) is None:
            raise KeyError(NOT_HERE)
        return parts.data()

    def _shard(self, session: str, of: tuple[str, ...]) -> bytes:
        """Return the packet of an aggregator's shards, or of the hub's."""
        packet = self._packets.get((int(of[0]), of[1] if len(of) > 1 else ""))
        if packet is None:
            raise KeyError(NOT_HERE)
        return packet

    def _handoff(self, session: str, of: tuple[str, ...]) -> bytes:
        """Return a handoff, cut down to those shards of the aggregator that have not merged it."""
        number, ex = int(of[0]), self._coordinator.exchange
        handoff = self._coordinator.handoffs.get(number)
        if handoff is None or ex is None or session not in ex.aggregators:
            raise KeyError(NOT_HERE)
        try:
            return self._lacking(number, handoff, ex.aggregators[session])
        except UpdateRejected:  # its aggregators find the same and go on without it
            return self._ledger.handoffs.packet(number)

    # ---- the commit thread ---------------------------------------------------------------------------------

    def own(self, round: int, shards: Sequence[int]) -> None:
        """Aggregate these shards at the hub from now on; store its error feedback of the others."""
        handoff = PendingHandoff(HUB, 1.0, self._all_shards - set(shards))
        if self._delegate.own(round, shards, lambda errors: self._store(handoff, errors)):
            self._ledger.handoffs.mark_merged(self._merged)
            self._merged = {}

    def store_handoff(self, action: do.Inherit, parts: ChunkBuffer) -> None:
        """Store a leaver's residual for the aggregators of all shards, the hub among them."""
        self._store(PendingHandoff(action.peer, action.share, self._all_shards), parts.data())

    def aggregate(self, action: do.Commit, updates: Sequence[WeightedPacket]) -> bytes | None:
        """Return the packet of all shards, or None where every aggregator is lost and no shard would move.

        Raises UpdateRejected where a peer's packet cannot be used, Abandoned.
        """
        weights = {peer: weight for peer, _, weight in updates}
        attempt = self.barrier.ask(action.aggregators)
        if action.aggregators:
            self._shell.apply(lambda _: self._coordinator.close(action.round, attempt, weights))
        came = self.barrier.wait()
        own = self._delegate.aggregate(action.round, updates)
        while came or action.hub_shards:
            parts = [
                ShardPacket(aggregator, action.aggregators[aggregator].shards, packet)
                for aggregator, packet in sorted(came.items())
            ]
            try:
                packet = self._delegate.joined(action.round, action.hub_shards, own, parts)
                self._serve(action, own, came)
                # An aggregator that is lost from now on has done its part.
                self.moved = {aggregator: digest_of(packet) for aggregator, packet in came.items()}
                return packet
            except UpdateRejected as error:
                if came.pop(error.peer, None) is None:
                    raise
                self.barrier.lose(error.peer, error.reason)
        return None

    def merged(self) -> Deliveries:
        """Return the handoffs that are in error feedback on disk once the newest aggregate is committed."""
        ex = self._coordinator.exchange
        return merge_deliveries(self._merged, merged_by(ex, self.moved) if ex is not None else {})

    def committed(self, action: do.Commit) -> None:
        """Merge handoffs into the hub's error feedback, as the other aggregators do now too."""
        self._merged = {handoff.number: action.hub_shards for handoff in action.handoffs}
        pending = self._ledger.handoffs.rows() if action.handoffs else {}
        for handoff in action.handoffs:
            try:
                packet = self._lacking(handoff.number, pending[handoff.number], action.hub_shards)
                self._delegate.inherit(handoff.peer, packet, handoff.share)
            except UpdateRejected as error:
                self._shell.warn(error.peer, f"its handoff cannot be used: {error.reason}")

    def _lacking(self, number: int, handoff: PendingHandoff, shards: Collection[int]) -> bytes:
        """Cut a handoff down to those of these shards that have not merged it yet: a shard whose aggregator
        changes meanwhile would merge it twice. Raises UpdateRejected."""
        packet, lacking = self._ledger.handoffs.packet(number), handoff.shards & set(shards)
        return self._delegate.restricted(handoff.peer, packet, lacking)[0]

    @property
    def _all_shards(self) -> frozenset[int]:
        return frozenset(range(self._coordinator.settings.shards))

    def _store(self, handoff: PendingHandoff, packet: bytes) -> int:
        """Store a handoff, so that it outlives the hub. Returns its number."""
        number = self._ledger.handoffs.add(handoff, packet)
        self._shell.apply(lambda _: self._coordinator.stored(number, handoff))
        return number

    def _store_error_feedback(self, session: str, peer: str, shards: Collection[int], packet: bytes) -> None:
        """Store the error feedback of shards that this peer aggregated, and nothing else in its packet."""
        moved: Sequence[int] = []
        try:
            packet, moved = self._delegate.restricted(peer, packet, shards)
        except UpdateRejected as error:
            self._shell.warn(peer, f"the errors of its shards cannot be used: {error.reason}")
        if moved:
            self._store(PendingHandoff(peer, 1.0, frozenset(moved)), packet)
        self._shell.apply(lambda _: self._coordinator.error_feedback_stored(session, moved))

    def _serve(self, action: do.Commit, own: bytes, came: Mapping[str, bytes]) -> None:
        """Serve the round's shard packets to peers that join them themselves; drop those of older rounds."""
        packets = {key: packet for key, packet in self._packets.items() if key[0] == action.round - 1}
        packets |= {(action.round, action.aggregators[s].name): packet for s, packet in came.items()}
        self._packets = packets | ({(action.round, ""): own} if action.hub_shards else {})
