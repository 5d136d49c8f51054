"""The hub's coordination of peers that aggregate shards: who aggregates in a round, whose parts have arrived,
which aggregators are lost, and which handoffs they still have to merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log2
from statistics import median
from typing import Any

from msgspec.structs import replace

from transport import actions as do
from transport.actions import Outbox
from transport.ledger import Deliveries, PendingHandoff, after_deliveries, handoffs_for, merge_deliveries
from transport.membership import Roster, Session, SessionEvent, State
from transport.protocol import ERROR, PART, SHARD, RunSettings, messages, round_and_name, round_of
from transport.scheduling import Exchange, Phase, Rounds

from .shard_assignment import assign
from .shard_placement import Placement

STEADY = 1.8  # times faster or slower: an uplink is another one
WORTH = 1.1  # by which unequal shares must be faster than equal ones
RESTS = 16  # rounds for which an aggregator that failed gets no shards


class ShardCoordinator:
    """State of a run whose shards are aggregated by peers.

    Args:
        handoffs: the pending ones, by number.
    """

    def __init__(
        self,
        settings: RunSettings,
        out: Outbox,
        members: Roster,
        rounds: Rounds,
        handoffs: Mapping[int, PendingHandoff],
    ) -> None:
        self.settings, self._out, self._members, self._rounds = settings, out, members, rounds
        self.handoffs = dict(handoffs)
        self._placed: tuple[object, list[int] | None] = (), None  # lines and aggregators, and their counts
        self._uplinks: dict[str, float] = {}  # key -> bytes a second, a power of two
        self.handlers: dict[type[messages.ToHub], Callable[[Session, Any, float], None]] = {
            messages.Holds: self._holds,
            messages.Unusable: self._unusable,
            messages.Resigns: self._resigns,
        }

    # ---- a round, as Rounds goes through it ----------------------------------------------------------------

    def opens(self, ex: Exchange, ready: list[Session]) -> None:
        """Assign the shards of a round that opens; the hub aggregates those that no peer can."""
        able = {f"{p.key} {p.name}": p for p in ready if p.can_aggregate and p.rests_until <= ex.round}
        for who, shards in assign(self.settings.shards, able, self._counts(able, ready)).items():
            ex.aggregators[able[who].id] = shards
            able[who].aggregated |= set(shards)
        taken = {shard for shards in ex.aggregators.values() for shard in shards}
        ex.hub_shards = tuple(shard for shard in range(self.settings.shards) if shard not in taken)

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
            placement = Placement(self.settings.shards, [[line] * len(lines) for line in lines], hosts)
            best = placement.best()
            worth = placement.cost(placement.equal()) > WORTH * placement.cost(best)
            self._placed = (lines, hosts), best if worth else None
        counts = self._placed[1]
        return None if counts is None else {who: counts[places[who][0]] for who in able}

    def announcement(self, ex: Exchange, session: Session, message: messages.Round) -> messages.Round:
        """Add the aggregators to a round's announcement; for them, the keys of those that may connect."""
        sessions = self._members.present(sorted(ex.aggregators, key=lambda s: ex.members[s]))
        infos = [messages.AggregatorInfo(s.name, ex.aggregators[s.id], s.key, s.address) for s in sessions]
        return replace(message, owners=infos, keys=dict(ex.keys) if session.id in ex.aggregators else {})

    def closes(self, ex: Exchange) -> None:
        """Choose the handoffs that the hub merges with this round."""
        ex.handoffs = self._handoffs_for(ex.hub_shards)

    def committed(self, ex: Exchange, done: do.CommitDone) -> None:
        """Rest aggregators that failed, and settle the handoffs that a durable round has merged."""
        lost = (ex.lost | done.lost.keys()) & ex.aggregators.keys() - done.moved.keys()
        for aggregator in sorted(lost, key=lambda s: ex.members[s]):
            why = done.lost.get(aggregator, "it is gone or silent")
            self._out.warn(f"its shards have not moved in round {ex.round}: {why}", ex.members[aggregator])
            self._rest(aggregator, ex)
        # One peer's word against another's, so neither gets a strike. The hub aggregates these shards for a
        # while and sees for itself what the denied peer sends.
        for name, aggregator in sorted(done.denied.items()):
            said = f"{ex.members[aggregator]}, which owns shards, cannot use its part: {done.rejected[name]}"
            self._out.warn(f"{said}; it owns none for {RESTS} rounds", name)
            self._rest(aggregator, ex)
        if done.packets:
            merged = merge_deliveries(
                merged_by(ex, done.moved), {handoff.number: ex.hub_shards for handoff in ex.handoffs}
            )
            left = self.handoffs | after_deliveries(self.handoffs, merged)
            self.handoffs = {number: handoff for number, handoff in left.items() if handoff.shards}

    def tick(self, ex: Exchange, now: float) -> None:
        """Give up aggregators that are gone or silent. A lost connection may be back in a moment."""
        for aggregator in sorted(ex.aggregators.keys() - ex.lost):
            session = self._members.get(aggregator)
            if session is None or self._members.suspect(session, now):
                self._lose(aggregator, now)

    # ---- from peers ----------------------------------------------------------------------------------------

    def refusal(self, session: Session, name: str) -> str | None:
        """Return why this upload for or of an aggregator is not wanted. Raises KeyError for other names."""
        if (part := round_and_name(PART, name)) is not None:
            return self._part_refusal(session, *part)
        if (shard := round_and_name(SHARD, name)) is not None:
            ex = self._rounds.exchange
            order = ex.closes.get(session.id) if ex is not None and ex.round == shard[0] else None
            wanted = order is not None and str(order.attempt) == shard[1]
            if wanted and self._rounds.phase is Phase.CLOSED:
                return None
            return f"attempt {shard[1]} of round {shard[0]} is not, or no more, what the hub asks for"
        if round_of(ERROR, name) is None:
            raise KeyError(name)
        if not session.aggregated:
            return "this session has no error feedback that it has not handed over"
        return "the one before is being checked" if session.handing_over else None

    def _part_refusal(self, session: Session, round: int, name: str) -> str | None:
        """Refuse parts but those for an aggregator that this peer cannot reach."""
        ex = self._rounds.open_to(session.id, round)
        if ex is None:
            return f"round {round} is not open to this peer, or is closed"
        aggregator = ex.aggregator_named(name)
        if aggregator is None:
            return f"{name!r} aggregates nothing in round {round}, or is lost"
        return "it is here already" if (aggregator, session.id) in ex.at_hub else None

    def part_uploaded(self, member: str, aggregator: str, round: int, digest: str, now: float) -> None:
        """Note that a member's part for this aggregator is at the hub, whole."""
        session, ex = self._members.get(member), self._rounds.exchange
        if session is not None:
            session.seen = now
        if ex is not None and ex.round == round:
            ex.at_hub[aggregator, member] = digest
            if session is not None:
                self._rounds.check_arrived(session, now)

    def _holds(self, session: Session, m: messages.Holds, now: float) -> None:
        """Note which members' parts an aggregator has."""
        ex = self._rounds.exchange
        if ex is None or ex.round != m.round or session.id not in ex.aggregators:
            self._members.ignored += 1
            return
        for member, name in ex.members.items():
            if name in m.parts:
                ex.delivered[session.id, member] = m.parts[name]
                if (sender := self._members.get(member)) is not None:
                    self._rounds.check_arrived(sender, now)

    def _unusable(self, session: Session, m: messages.Unusable, now: float) -> None:
        ex = self._rounds.exchange
        order = ex.closes.get(session.id) if ex is not None and ex.round == m.round else None
        if order is None or order.attempt != m.attempt or m.peer not in order.weights:
            self._members.ignored += 1
        else:
            self._out.add(do.RejectPart(session.id, m.attempt, m.peer, m.reason))

    def _resigns(self, session: Session, m: messages.Resigns, now: float) -> None:
        """Assign no more shards to this peer; those of the open round are its last."""
        session.can_aggregate = False
        if m.lost:
            self._lose(session.id, now)
        if m.last and session.state in (State.TRAINING, State.READY):
            self._members.move(session, SessionEvent.LEAVING)

    # ---- from the shell ------------------------------------------------------------------------------------

    def close(self, round: int, attempt: int, weights: Mapping[str, float]) -> None:
        """Order each aggregator to aggregate these updates and to send the packet of its shards."""
        ex = self._rounds.exchange
        if ex is None or ex.round != round or self._rounds.phase is not Phase.CLOSED:
            return
        for session in self._members.present(ex.aggregators):
            if session.id not in ex.lost:
                shards = ex.aggregators[session.id]
                parts = ex.parts_for(session.id, weights)
                order = messages.Close(
                    round, attempt, shards, dict(weights), parts, self._handoffs_for(shards)
                )
                ex.closes[session.id] = order
                self._out.send(session.conn, order)

    def stored(self, number: int, handoff: PendingHandoff) -> None:
        """Offer a handoff, which is on the disk now, to the aggregators of its shards."""
        self.handoffs[number] = handoff

    def error_feedback_stored(self, session_id: str, shards: Sequence[int]) -> None:
        """Offered error feedback is stored. Rest its sender: else it would have more of it to hand over."""
        session, ex = self._members.get(session_id), self._rounds.exchange
        if session is not None:
            session.handing_over = False
            session.aggregated -= set(shards)
            if ex is not None and set(shards) & set(ex.aggregators.get(session_id, ())):
                self._rest(session_id, ex)

    def receiving(self, session_id: str) -> Session | None:
        """Mark that a session's error feedback is being checked. Returns the session if it is live."""
        session = self._members.get(session_id)
        if session is not None:
            session.handing_over = True
        return session

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def exchange(self) -> Exchange | None:
        return self._rounds.exchange

    def _rest(self, aggregator: str, ex: Exchange) -> None:
        if (session := self._members.get(aggregator)) is not None:
            session.rests_until = ex.round + RESTS

    def _lose(self, aggregator: str, now: float) -> None:
        """Give up an aggregator: its shards do not move, so their updates stay residuals of the senders."""
        ex = self._rounds.exchange
        if ex is None or aggregator not in ex.aggregators or aggregator in ex.lost:
            return
        ex.lost.add(aggregator)
        if self._rounds.phase is Phase.CLOSED:
            self._out.add(do.LoseAggregator(aggregator))
        for session in self._members.present(ex.members):
            self._rounds.check_arrived(session, now)

    def _handoffs_for(self, shards: Iterable[int]) -> list[messages.HandoffOffer]:
        found = sorted(handoffs_for(self.handoffs, shards).items())
        return [messages.HandoffOffer(number, one.peer, one.share) for number, one in found]


def merged_by(ex: Exchange, aggregators: Iterable[str]) -> Deliveries:
    """Return handoff number -> shards in whose error feedback it is once the round is committed."""
    merged: dict[int, list[int]] = {}
    for aggregator in aggregators:
        for handoff in ex.closes[aggregator].estates if aggregator in ex.closes else ():
            merged.setdefault(handoff.number, []).extend(ex.aggregators[aggregator])
    return merged
