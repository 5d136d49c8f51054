"""The hub's part: who aggregates in a round, whose parts have arrived, which aggregators are lost, and which
handoffs they still have to merge. It relays parts, and joins a round's packet from theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import log2
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import msgspec

from transport.actions import CommitDone
from transport.hub import HubParts
from transport.ledger import Counted
from transport.membership import Session, SessionEvent, State
from transport.protocol import (
    Cost,
    Event,
    ObjectKind,
    SampleRanges,
    UpdateRejected,
    WeightedPacket,
    messages,
    read_msgpack,
)
from transport.scheduling import CommitSeconds, Exchange, HubExtension, Lines, Phase, Sums, UploadKind
from transport.transfer import ChunkBuffer, ObjectSource, ObjectStore, memory_source

from . import bodies
from .bodies import NAME, AggregatorInfo, Holds, Resigns, ShardPacket, Unusable
from .residual_handoffs import HUB, HandoffStore, PendingHandoff, after_deliveries, merge_deliveries
from .shard_placement import Placement, assign
from .shard_round import ShardBarrier, ShardRound

if TYPE_CHECKING:
    from .durable_shards import HubAggregator

STEADY = 1.8  # times faster or slower: an uplink is another one
WORTH = 1.1  # by which unequal shares must be faster than equal ones
RESTS = 16  # rounds for which an aggregator that failed gets no shards
OWED = 4096  # keys that may still hand over error feedback when they are back
MADE = 256  # objects cached
NOT_HERE, SILENT = "it is not here for this session", "it is gone or silent"
RELAYED_PART = ObjectKind("part/<round>/<peer>", ("peer",), "a part of a packet", Cost.ROUND)
SHARD_PACKET = ObjectKind("shard/<round>/<peer>", ("peer",), "a part of a packet", Cost.ROUND)
OWN_SHARDS = ObjectKind("shard/<round>", ("peer",), "a part of a packet", Cost.ROUND)
HANDED_OVER = ObjectKind("handoff/<number>", ("peer",), "a part of a handoff", Cost.READ)


class ShardCoordinator(HubExtension):
    """State of a run whose shards are aggregated by peers. The last sections name the threads that call their
    methods, the hub's I/O thread all others.

    Args:
        shards: of the global model.
        store: the pending handoffs.
        work: the hub's own shards.
        largest: bytes of error feedback, at most.
    """

    name, dials = NAME, True

    def __init__(
        self, hub: HubParts, store: HandoffStore, work: HubAggregator, shards: int, largest: int
    ) -> None:
        self._out, self._members, self._rounds = hub.out, hub.members, hub.rounds
        self.store, self._work, self.shards = store, work, shards
        self.now = ShardRound(-1, {}, (), {})  # the newest round
        self.barrier = ShardBarrier(hub.settings.peer_timeout)
        self.moved: dict[str, str] = {}  # session -> digest of its packet in the newest aggregate
        self.denied: dict[str, str] = {}  # peer -> session of who has refused its part of that round
        self._lines: Lines
        self._round: ShardRound  # the one that has closed
        self._inner: Sums  # sums the hub's own shards
        self._packets: dict[tuple[int, str], bytes] = {}  # (round, aggregator; "": the hub) -> its packet
        self._parts: dict[tuple[int, str, str], ChunkBuffer] = {}  # (round, aggregator, member)
        # Handoffs in the hub's error feedback since a round was committed, and on disk with the next one.
        self._merged: dict[int, tuple[int, ...]] = {}
        self._made: OrderedDict[tuple[str, str], ObjectSource] = OrderedDict()  # by session and name
        self.uploads = (
            UploadKind("part/<round>/<peer>", self._part_refusal, self._part_came),
            UploadKind("shard/<round>/<number>", self._shard_refusal, self._shard_came),
            UploadKind("error/<round>", self._error_refusal, self._error_came, largest),
        )
        self._placed: tuple[object, list[int] | None] = (), None  # lines and aggregators, and their counts
        self._uplinks: dict[str, float] = {}  # key -> bytes a second, a power of two
        self._done: dict[str, bodies.Done] = {}  # session -> the end of the newest round
        self._resigned: set[str] = set()  # sessions
        self._rests: dict[str, int] = {}  # session -> the round from which it may aggregate again
        self._handing_over: set[str] = set()  # sessions whose error feedback is being checked
        self._aggregated: dict[str, set[int]] = {}  # session -> shards whose e it may still hand over
        # Any member from before a restart may come back with e of shards: the ledger does not say of which.
        everything = range(shards)
        self._owed: dict[str, Collection[int]] = {p.key: everything for p in hub.recovered.peers}
        for old in hub.recovered.sessions:
            self._aggregated[old.session] = set(self._owed.get(old.key, ()))

    # ---- a round, as the hub goes through it ---------------------------------------------------------------

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        """Assign the shards of a round that opens; the hub aggregates those that no peer can."""
        ready = [p for p in self._members.present(ex.members) if p.id not in ex.spans]
        able = {
            f"{p.key} {p.name}": p
            for p in ready
            if p.reachable and p.id not in self._resigned and self._rests.get(p.id, 0) <= ex.round
        }
        found = dict[str, AggregatorInfo]()
        for who, shards in assign(self.shards, able, self._counts(able, ready)).items():
            p = able[who]
            found[p.id] = AggregatorInfo(p.name, shards, p.key, p.address)
            self._aggregated.setdefault(p.id, set()).update(shards)
        taken = {shard for one in found.values() for shard in one.shards}
        hub_shards = tuple(shard for shard in range(self.shards) if shard not in taken)
        by_name = dict(sorted(found.items(), key=lambda one: one[1].name))
        self.now = ShardRound(ex.round, ex.members, hub_shards, by_name)
        self.at_once = len(found)
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] >= ex.round}
        self._made = OrderedDict()  # the round itself may have been open before, with other parts
        self._lines.later(lambda: self._own(ex.round, hub_shards))

    def _counts(self, able: Mapping[str, Session], ready: list[Session]) -> dict[str, int] | None:
        """Place shards by measured uplinks; None: equal shares, as where all uplinks are about alike.

        Downlinks are taken to be no slower, as on lines of people. An uplink counts as a power of two and
        stays one until it is far from it, as each shard that moves takes its error feedback along.
        """
        measured = [p.uplink for p in ready if p.uplink]
        if len(ready) < 2 or not able or not measured:
            return None
        for p in ready:
            uplink, known = p.uplink or median(measured), self._uplinks.get(p.key, 0.0)
            if not known / STEADY <= uplink <= known * STEADY:
                self._uplinks[p.key] = 2.0 ** round(log2(uplink))
        places = {f"{p.key} {p.name}": (place, self._uplinks[p.key]) for place, p in enumerate(ready)}
        lines, hosts = tuple(uplink for _, uplink in places.values()), tuple(places[who][0] for who in able)
        if self._placed[0] != (lines, hosts):
            placement = Placement(self.shards, [[line] * len(lines) for line in lines], hosts)
            best = placement.best()
            worth = placement.cost(placement.equal()) > WORTH * placement.cost(best)
            self._placed = (lines, hosts), best if worth else None
        counts = self._placed[1]
        return None if counts is None else {who: counts[places[who][0]] for who in able}

    def announce(self, ex: Exchange, session: Session) -> bytes:
        """Name the aggregators to a member. Those that have shards in this round, or have error feedback of
        some, are told of it before."""
        now = self.now
        if now.round != ex.round:
            return b""
        if (mine := now.aggregators.get(session.id)) is not None:
            self._say(session, bodies.Open(ex.round, mine.shards, dict(ex.keys), ex.fits, ex.rung))
        elif session.address and self._aggregated.get(session.id):
            self._say(session, bodies.Open(ex.round, [], {}, rung=ex.rung))
        if not now.aggregators:
            return b""
        infos = [one for s, one in now.aggregators.items() if s in self._members]
        unnamed = len(ex.members) > messages.NAMED
        return msgspec.msgpack.encode(bodies.Opened(infos, list(ex.names) if unnamed else []))

    def heard(self, session: Session, report: messages.Report, now: float) -> None:
        """Note the parts that a member reports; the newest count."""
        ex = self._rounds.open_to(session.id, report.round)
        if ex is None or session.id in ex.claims:
            return
        with self._members.ignoring_unreadable():
            body = report.extra.get(NAME)
            self.now.parts[session.id] = read_msgpack(body, bodies.Parts, "its parts").parts if body else {}

    def whole(self, session: Session) -> bool:
        """Tell whether all parts of a member's update have arrived."""
        return self.now.whole(session.id)

    def closes(self, ex: Exchange) -> None:
        """Choose the handoffs that the hub merges with this round."""
        self.now.handoffs = self._handoffs_for(self.now.hub_shards)
        self._round, self.moved, self.denied = self.now, {}, {}
        self.barrier.begin()

    def sums(self, inner: Sums) -> Sums:
        """Sum with the aggregators of a round."""
        self._inner = inner
        return Sums(self._aggregate, self._inherit, self._merge)

    def counted(self, round: int, counted: Sequence[Counted], took: CommitSeconds) -> Mapping[str, bytes]:
        """Tell members which aggregators' shards have not moved; in the commit thread."""
        now, moved = self.now, self.moved
        if not now.aggregators:
            return {}
        unmoved = [one.name for s, one in now.aggregators.items() if s not in moved]
        return dict.fromkeys(now.members, msgspec.msgpack.encode(bodies.Unmoved(unmoved)))

    def may_strike(self, peer: str) -> bool:
        """Refuse a strike where it is one peer's word against another's."""
        return peer not in self.denied

    def committed(self, ex: Exchange, done: CommitDone, now: float) -> Sequence[Event]:
        """Rest aggregators that failed, and settle the handoffs that a durable round has merged."""
        current, moved, why_lost = self.now, self.moved, self.barrier.lost
        lost = (current.lost | why_lost.keys()) & current.aggregators.keys() - moved.keys()
        for aggregator in sorted(lost, key=lambda s: current.aggregators[s].name):
            why = why_lost.get(aggregator, SILENT)
            name = current.aggregators[aggregator].name
            self._out.warn(f"its shards have not moved in round {ex.round}: {why}", name)
            self._rest(aggregator)
        # The hub aggregates these shards for a while and sees for itself what the denied peer sends.
        for name, aggregator in sorted(self.denied.items()):
            whose = current.aggregators[aggregator].name
            said = f"{whose}, which owns shards, cannot use its part: {done.rejected[name]}"
            self._out.warn(f"{said}; it owns none for {RESTS} rounds", name)
            self._rest(aggregator)
        if done.packets:
            self._done = {s: bodies.Done(ex.round, moved.get(s, "")) for s in current.aggregators}
            for session in self._members.present(self._done):
                self._say(session, self._done[session.id])
        return ()

    def welcomed(self, session: Session) -> None:
        """Say again what an aggregator on a new connection may have missed."""
        if (done := self._done.get(session.id)) is not None:
            self._say(session, done)
        if self._rounds.phase is Phase.CLOSED and session.id in self.now.closes:
            self._say(session, self.now.closes[session.id])

    def tick(self, now: float) -> None:
        """Give up aggregators that are gone or silent. A lost connection may be back in a moment."""
        for aggregator in sorted(self.now.aggregators.keys() - self.now.lost) if self._open else ():
            session = self._members.get(aggregator)
            if session is None or self._members.suspect(session, now):
                self._lose(aggregator, now)

    def moves(self, session: str) -> None:
        """Note that an aggregator is not silent."""
        self.barrier.moves(session)

    def hello(self, session: Session, body: bytes, now: float) -> None:
        """Let a session hand over what an earlier one of its key has aggregated."""
        self._aggregated.setdefault(session.id, set()).update(self._owed.pop(session.key, ()))

    def session_ended(self, session: Session) -> None:
        if shards := self._aggregated.pop(session.id, None):
            self._owed.pop(session.key, None)
            self._owed = dict([*self._owed.items(), (session.key, shards)][-OWED:])
        self._resigned.discard(session.id)
        self._handing_over.discard(session.id)
        self._rests.pop(session.id, None)

    def ended(self) -> None:
        self.barrier.end()

    def stops(self) -> None:
        self.barrier.end()

    def serve(self, objects: ObjectStore) -> None:
        """Add the rows of what aggregators and members fetch."""
        for kind, find in (
            (RELAYED_PART, self._part),
            (SHARD_PACKET, self._shard),
            (OWN_SHARDS, self._shard),
            (HANDED_OVER, self._handoff),
        ):
            objects.serve(kind, partial(self._cached, find))

    def watch(self, lines: Lines) -> None:
        self._lines = lines

    # ---- from peers ----------------------------------------------------------------------------------------

    def received(self, session: Session, body: bytes, now: float) -> None:
        kinds = cast("type[Holds | Unusable | Resigns]", Holds | Unusable | Resigns)
        said = read_msgpack(body, kinds, "what an aggregator says")
        handlers: dict[type[Any], Callable[[Session, Any, float], None]] = {
            Holds: self._holds,
            Unusable: self._unusable,
            Resigns: self._resigns,
        }
        handlers[type(said)](session, said, now)

    @property
    def _open(self) -> ShardRound | None:
        """The round that is open, or closed and not committed yet."""
        ex = self._rounds.exchange
        return self.now if ex is not None and ex.round == self.now.round else None

    def _holds(self, session: Session, m: Holds, now: float) -> None:
        """Note which members' parts an aggregator has."""
        of = self._open
        if of is None or of.round != m.round or session.id not in of.aggregators:
            self._members.ignored += 1
            return
        for member, name in of.members.items():
            if name in m.parts:
                of.delivered[session.id, member] = m.parts[name]
                if (sender := self._members.get(member)) is not None:
                    self._rounds.check_arrived(sender, now)

    def _unusable(self, session: Session, m: Unusable, now: float) -> None:
        of = self._open
        order = of.closes.get(session.id) if of is not None and of.round == m.round else None
        if order is None or order.attempt != m.attempt or m.peer not in order.weights:
            self._members.ignored += 1
        else:
            self.barrier.refuse(session.id, m.attempt, m.peer, m.reason)

    def _resigns(self, session: Session, m: Resigns, now: float) -> None:
        """Assign no more shards to this peer; those of the open round are its last."""
        self._resigned.add(session.id)
        if m.lost:
            self._lose(session.id, now)
        if m.last and session.state in (State.TRAINING, State.READY):
            self._members.move(session, SessionEvent.LEAVING)

    # ---- uploads -------------------------------------------------------------------------------------------

    def _part_refusal(self, session: Session, at: Sequence[str]) -> str | None:
        """Refuse parts but those for an aggregator that this peer cannot reach."""
        of, (round, name) = self._open, at
        if of is None or self._rounds.open_to(session.id, int(round)) is None:
            return f"round {int(round)} is not open to this peer, or is closed"
        if (aggregator := of.named(name)) is None:
            return f"{name!r} aggregates nothing in round {int(round)}, or is lost"
        return "it is here already" if (aggregator, session.id) in of.at_hub else None

    def _part_came(self, session: Session, at: Sequence[str], part: ChunkBuffer, now: float) -> None:
        of = self._open
        if of is not None and of.round == int(at[0]) and (aggregator := of.named(at[1])) is not None:
            self._parts[of.round, aggregator, session.id] = part
            self.part_uploaded(session, aggregator, bodies.short(part.sha256), now)

    def part_uploaded(self, session: Session, aggregator: str, digest: str, now: float) -> None:
        """Note that a member's part for this aggregator is at the hub, whole."""
        session.seen = now
        self.now.at_hub[aggregator, session.id] = digest
        self._rounds.check_arrived(session, now)

    def _shard_refusal(self, session: Session, at: Sequence[str]) -> str | None:
        of, (round, attempt) = self._open, map(int, at)
        order = of.closes.get(session.id) if of is not None and of.round == round else None
        if order is not None and order.attempt == attempt and self._rounds.phase is Phase.CLOSED:
            return None
        return f"attempt {attempt} of round {round} is not, or no more, what the hub asks for"

    def _shard_came(self, session: Session, at: Sequence[str], packet: ChunkBuffer, now: float) -> None:
        self.barrier.came(session.id, int(at[1]), packet)

    def _error_refusal(self, session: Session, at: Sequence[str]) -> str | None:
        if not self._aggregated.get(session.id):
            return "this session has no error feedback that it has not handed over"
        return "the one before is being checked" if session.id in self._handing_over else None

    def _error_came(self, session: Session, at: Sequence[str], packet: ChunkBuffer, now: float) -> None:
        self._handing_over.add(session.id)
        of, shards = (session.id, session.name), frozenset(self._aggregated.get(session.id, ()))
        self._lines.later(lambda: self._store_error_feedback(*of, shards, packet.data()))

    # ---- from the commit thread ----------------------------------------------------------------------------

    def close(self, round: int, attempt: int, weights: Mapping[str, float]) -> None:
        """Order each aggregator to aggregate these updates and to send the packet of its shards."""
        of, ex = self._open, self._rounds.exchange
        if of is None or ex is None or of.round != round or self._rounds.phase is not Phase.CLOSED:
            return
        sessions = {of.members[s]: s for s in ex.claims}
        for session in self._members.present(of.aggregators):
            if session.id not in of.lost:
                parts = {peer: of.part(session.id, sessions[peer]) for peer in weights if peer in sessions}
                left = self._handoffs_for(of.aggregators[session.id].shards)
                of.closes[session.id] = order = bodies.Close(round, attempt, dict(weights), parts, left)
                self._say(session, order)

    def error_feedback_stored(self, session: str, shards: Sequence[int]) -> None:
        """Offered error feedback is stored. Rest its sender: else it would have more of it to hand over."""
        self._handing_over.discard(session)
        if session in self._members:
            self._aggregated.get(session, set()).difference_update(shards)
            mine = self._open.aggregators.get(session) if self._open is not None else None
            if mine is not None and set(shards) & set(mine.shards):
                self._rest(session)

    # ---- state ---------------------------------------------------------------------------------------------

    def _say(self, session: Session, order: bodies.Order) -> None:
        self._out.send(session.conn, messages.Extension(NAME, msgspec.msgpack.encode(order)))

    def _rest(self, aggregator: str) -> None:
        if aggregator in self._members:
            self._rests[aggregator] = self.now.round + RESTS

    def _lose(self, aggregator: str, now: float) -> None:
        """Give up an aggregator: its shards do not move, so their updates stay residuals of the senders."""
        of = self._open
        if of is None or aggregator not in of.aggregators or aggregator in of.lost:
            return
        of.lost.add(aggregator)
        if self._rounds.phase is Phase.CLOSED:
            self.barrier.lose(aggregator, SILENT)
        for session in self._members.present(of.members):
            self._rounds.check_arrived(session, now)

    @property
    def handoffs(self) -> dict[int, PendingHandoff]:
        """The pending handoffs, by number, without what the hub has merged since they were last written."""
        return self.store.rows | after_deliveries(self.store.rows, self._merged)

    def _handoffs_for(self, shards: Iterable[int]) -> list[bodies.HandoffOffer]:
        wanted, pending = set(shards), sorted(self.handoffs.items())
        offered = ((number, one) for number, one in pending if one.shards & wanted)
        return [bodies.HandoffOffer(number, one.peer, one.share) for number, one in offered]

    # ---- the reader thread ---------------------------------------------------------------------------------

    def _cached(
        self, find: Callable[[str, tuple[str, ...]], bytes], session: str, name: str, of: tuple[str, ...]
    ) -> ObjectSource:
        made = self._made  # that of the next round is another
        if (session, name) not in made:
            made[session, name] = memory_source(find(session, of))
            if len(made) > MADE:
                made.popitem(last=False)
        return made[session, name]

    def _part(self, session: str, of: tuple[str, ...]) -> bytes:
        """Return a member's part for the aggregator that asks. Raises KeyError, as do the next two."""
        member = next((s for s, called in self.now.members.items() if called == of[1]), "")
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
        number, now = int(of[0]), self.now
        handoff = self.handoffs.get(number)
        if handoff is None or session not in now.aggregators:
            raise KeyError(NOT_HERE)
        try:
            return self._lacking(number, handoff, now.aggregators[session].shards)
        except UpdateRejected:  # its aggregators find the same and go on without it
            return self.store.packet(number)

    # ---- the commit thread ---------------------------------------------------------------------------------

    def _own(self, round: int, shards: Sequence[int]) -> None:
        """Aggregate these shards at the hub from now on; store its error feedback of the others."""
        handoff = PendingHandoff(HUB, 1.0, frozenset(range(self.shards)) - set(shards))
        if self._work.own(round, shards, partial(self.store.add, handoff)):
            self.store.mark_merged(self._merged)
            self._merged = {}

    def _inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Store a leaver's residual for the aggregators of all shards, the hub among them."""
        self.store.add(PendingHandoff(peer, share, frozenset(range(self.shards))), packet)

    def _aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """Return the packet of all shards; empty where every aggregator is lost and no shard would move.

        Raises UpdateRejected where a peer's packet cannot be used, Abandoned.
        """
        of, self.moved = self._round, {}
        asked = {s: info for s, info in of.aggregators.items() if s not in of.lost}
        weights = {peer: weight for peer, _, weight in updates}
        attempt = self.barrier.ask(asked)
        if asked:
            self._lines.apply(lambda _: self.close(round, attempt, weights))
        came = self.barrier.wait(self.denied)
        own = self._inner.aggregate(round, updates)
        while came or of.hub_shards:
            parts = [ShardPacket(s, asked[s].shards, packet) for s, packet in sorted(came.items())]
            try:
                packet = self._work.joined(round, of.hub_shards, own, parts)
                self._serve(of, own, came)
                # An aggregator that is lost from now on has done its part.
                self.moved = {aggregator: bodies.digest_of(one) for aggregator, one in came.items()}
                return packet
            except UpdateRejected as error:
                if came.pop(error.peer, None) is None:
                    raise
                self.barrier.lose(error.peer, error.reason)
        return b""

    def noted(self, round: int) -> str:
        """Note the handoffs that are in error feedback on disk once the newest aggregate is committed."""
        merged = merge_deliveries(self._merged, self._round.merged_by(self.moved))
        return self.store.after(merged) if merged else ""

    def _merge(self, round: int, packet: bytes) -> None:
        """Merge handoffs into the hub's error feedback, as the other aggregators do now too."""
        self._inner.committed(round, packet)
        self.store.settle()
        of = self._round
        self._merged = {handoff.number: of.hub_shards for handoff in of.handoffs}
        for handoff in of.handoffs:
            try:
                lacking = self._lacking(handoff.number, self.store.rows[handoff.number], of.hub_shards)
                self._inner.inherit(handoff.peer, lacking, handoff.share)
            except UpdateRejected as error:
                self._lines.warn(error.peer, f"its handoff cannot be used: {error.reason}")

    def _lacking(self, number: int, handoff: PendingHandoff, shards: Collection[int]) -> bytes:
        """Cut a handoff down to those of these shards that have not merged it yet: a shard whose aggregator
        changes meanwhile would merge it twice. Raises UpdateRejected."""
        packet, lacking = self.store.packet(number), handoff.shards & set(shards)
        return self._work.restricted(handoff.peer, packet, lacking)[0]

    def _store_error_feedback(self, session: str, peer: str, shards: Collection[int], packet: bytes) -> None:
        """Store the error feedback of shards that this peer aggregated, and nothing else in its packet."""
        moved: Sequence[int] = []
        try:
            packet, moved = self._work.restricted(peer, packet, shards)
        except UpdateRejected as error:
            self._lines.warn(peer, f"the errors of its shards cannot be used: {error.reason}")
        if moved:
            self.store.add(PendingHandoff(peer, 1.0, frozenset(moved)), packet)
        self._lines.apply(lambda _: self.error_feedback_stored(session, moved))

    def _serve(self, of: ShardRound, own: bytes, came: Mapping[str, bytes]) -> None:
        """Serve the round's shard packets to peers that join them themselves; drop those of older rounds."""
        packets = {key: packet for key, packet in self._packets.items() if key[0] == of.round - 1}
        packets |= {(of.round, of.aggregators[s].name): packet for s, packet in came.items()}
        self._packets = packets | ({(of.round, ""): own} if of.hub_shards else {})
