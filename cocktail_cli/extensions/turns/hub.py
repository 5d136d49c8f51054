"""Members of rounds that take fewer peers than are ready (`swarm.members_per_round`): they take turns.

    waiting --called--> catches up --ready--> fresh --a place is free--> member --its turn is over--> waiting

A peer that joins the members must have every packet before, and 200 packets are as large as the model.
Members drawn anew for each round (MoDeST, de Vos et al., 2023) would fetch every packet in the end. A
turn's cost does not grow with its length. So a member stays for one long turn, and places change hands one
after another (sticky sampling: GlueFL, He et al., MLSys 2023). Samples are the hub's and not the peers', so
who computes them changes nothing in what is learnt.

turn        rounds of the run x places / (peers - places / 2), so that all who are there at the beginning have
            one. A peer whose updates come late has a shorter one: this weighs it by its reliability
ticket      the lowest goes first: the round in which the wait began + a draw in [0, turn], + a turn after the
            first one. The draw is exponential, seeded by (recipe, round, name), and divided by reliability
            (Efraimidis and Spirakis, 2006): a weighted lottery, with an end to bad luck
called      the first AHEAD of the places in the line catch up meanwhile, and stay within NEAR packets
farewell    a member whose turn is over delivers its last lease in one more round, without a new one

The law: who can follow waits for at most turn x (peers / places + 2) rounds. After two turns no later ticket
is lower, and in a turn all places change hands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from typing import Any

from transport.hub import HubParts
from transport.membership import Session, State
from transport.protocol import SampleRanges
from transport.scheduling import Exchange, HubExtension

IN_LINE = "in line"  # the state of a peer that waits for its turn
AHEAD, FEWEST = 1 / 8, 2  # of the places, and at least: peers that are called before a place is free
NEAR = 2  # packets that a peer may lack as it takes a place
SHORTEST = 8  # rounds of a turn, as the last one brings no new work
SPREAD = 4  # mean draws in the longest one
AWAY = 3  # rounds for which the place of a late member is kept


@dataclass
class Turn:
    """A peer in the line, or in its turn."""

    ticket: float = 0.0  # its place in the line
    since: int | None = None  # first round of its turn; None: it waits
    until: int = -1  # the last round that it has a lease for
    called: int | None = None  # the round that it is called for; None: it has answered


class Turns(HubExtension):
    """The line and the turns of peers, by session. A round opened again keeps its number and its members."""

    def __init__(self, hub: HubParts, places: int) -> None:
        self.places = places
        self._settings, self._rounds = hub.settings, hub.rounds
        self._turns: dict[str, Turn] = {}
        self._due = 0.0  # places that are to change hands
        self._round = -1  # the newest that members were chosen for
        self._free = 0  # places that nobody took
        self.last: frozenset[str] = frozenset()  # members whose turn is over: they get no new lease
        last = hub.recovered.last  # after a restart of the hub its members go on with their turns
        for old in hub.recovered.sessions if last is not None else ():
            if last is not None and old.name in last.members:
                hub.members.sessions[old.session].at = hub.recovered.round
                self._turns[old.session] = Turn(since=hub.recovered.round, until=hub.recovered.round)

    # ---- what the hub asks -------------------------------------------------------------------------------

    def choose(
        self, round: int, ready: Sequence[Session], holding: Collection[str], newcomers: int
    ) -> list[Session] | None:
        """Choose the members, and call those whose turn is near."""
        chosen = self.members(round, ready, holding, newcomers)
        for session in self.to_call(round, ready):
            self._rounds.call(session, round)
        return chosen

    def no_lease(self, session: Session, round: int) -> str:
        """Refuse a lease to a member whose turn is over."""
        return "its turn is over" if round == self._round and session.id in self.last else ""

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        """Note members whose leases last for several rounds."""
        for session, rounds in ex.spans.items():
            self._turns[session].until += rounds - 1

    def may_close(self, arrived: int, missing: int) -> bool:
        """Let a round close without the missing ones: half of those sampled are a quorum."""
        return arrived >= missing

    def may_evaluate(self, session: Session, round: int) -> bool:
        """Leave out those that lack more than a few packets."""
        return round - session.at <= NEAR

    def welcomed(self, session: Session) -> None:
        """Call a peer again that was called and has not answered."""
        turn = self._turns.get(session.id)
        if turn is not None and turn.called is not None:
            self._rounds.call(session, turn.called)

    def session_ended(self, session: Session) -> None:
        self._turns.pop(session.id, None)

    def peer_status(self, session: Session) -> dict[str, Any]:
        """Return the place of a peer that waits."""
        place = self.line().get(session.id) if session.state is State.READY else None
        return {"turn": place} if place is None else {"turn": place, "state": IN_LINE}

    # ---- who ---------------------------------------------------------------------------------------------

    def members(
        self, round: int, ready: Sequence[Session], holding: Collection[str], newcomers: int
    ) -> list[Session]:
        """Choose the members of a round, at most as many as there are places; by name.

        Args:
            ready: sessions that could be members.
            holding: those of them with a lease that they have not delivered.
            newcomers: at most so many members without an update in the run.
        """
        self._enter(round, ready)
        here = [s for s in ready if self._turns[s.id].since is not None or s.id in holding]
        here.sort(key=lambda s: self._age(round, s), reverse=True)
        line = self._line(ready, here)
        near = [s for s in line if self.may_evaluate(s, round)]
        near = with_few_new(near, newcomers - sum(not s.proven for s in here))
        kept = self.places - self._late(round, here)
        change = min(self._places_due(round, bool(line)), max(0, len(near) - max(0, kept - len(here))))
        over = here[: max(change, len(here) - kept)]
        gone = [s for s in over if s.id not in holding]
        for s in gone:
            self._wait(s, round)
        self._due = max(0.0, self._due - len(gone))
        staying = [s for s in here if s not in gone][: self.places]
        self.last = frozenset(s.id for s in staying if s in over or self._turns[s.id].since is None)
        members = staying + near[: max(0, kept - len(staying))]
        members += self._nearest(round, ready, members)
        self._free = max(0, kept - len(members))
        for s in members:
            turn = self._turns[s.id]
            turn.since = round if turn.since is None and s.id not in holding else turn.since
            turn.until, turn.called, s.at = round, None, max(s.at, round)
        return sorted(members, key=lambda s: s.name)

    def to_call(self, round: int, ready: Sequence[Session]) -> list[Session]:
        """Return those that are to catch up now, as their turn is near."""
        line = self._line(ready, [s for s in ready if self._turns[s.id].since is not None])
        found = []
        for s in line[: max(FEWEST, ceil(self.places * AHEAD), self._free)]:
            turn = self._turns[s.id]
            if turn.called is None and round - s.at >= NEAR:
                turn.called = round
                found.append(s)
            elif turn.called is not None and round - turn.called > self._length():
                self._wait(s, round)  # it cannot follow: to the end of the line
        return found

    def caught_up(self, session: Session) -> None:
        """Note the answer of a called peer."""
        turn = self._turns.get(session.id)
        if turn is not None and turn.called is not None and session.at >= turn.called:
            turn.called = None

    # ---- the line ----------------------------------------------------------------------------------------

    def line(self) -> dict[str, int]:
        """Return the place in the line of each session that waits, 1 for the next one."""
        waiting = {session: turn.ticket for session, turn in self._turns.items() if turn.since is None}
        return {session: place for place, session in enumerate(sorted(waiting, key=waiting.__getitem__), 1)}

    def _enter(self, round: int, ready: Sequence[Session]) -> None:
        """Put newcomers into the line, and members that have lost their place."""
        new = [s for s in ready if s.id not in self._turns]
        self._turns |= {s.id: Turn() for s in new}  # all at once: a turn is as long as there are peers
        for s in ready:
            turn = self._turns[s.id]
            if s in new or (turn.since is not None and round - turn.until > AWAY):
                self._wait(s, round)

    def _wait(self, session: Session, round: int) -> None:
        turn = self._turns[session.id]
        draw = -log(self._drawn(round, session.name)) / SPREAD / reliability(session)
        turn.ticket = round + self._length() * (min(1.0, draw) + (turn.since is not None))
        turn.since, turn.called = None, None

    def _line(self, ready: Sequence[Session], without: Sequence[Session]) -> list[Session]:
        """Return the waiting ones, in their order."""
        out = {s.id for s in without}
        waiting = (s for s in ready if s.id not in out)
        return sorted(waiting, key=lambda s: (self._turns[s.id].ticket, s.name))

    def _length(self) -> int:
        """Return the rounds of a turn."""
        s = self._settings
        rounds = ceil(s.samples / (s.global_batch * min(rung.local_steps for rung in s.rungs)))
        return max(SHORTEST, rounds * self.places // max(self.places, len(self._turns) - self.places // 2))

    def _drawn(self, round: int, name: str) -> float:
        """Draw from (0, 1]: the same wherever and whenever it is computed."""
        seed = f"{self._settings.recipe_hash}/{round}/{name}"
        return (1 + int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "big")) / 2**48

    def _age(self, round: int, session: Session) -> tuple[float, float]:
        """Sort by how much of its turn a member has had; of those that are alike the draw decides."""
        since = self._turns[session.id].since
        served = (round - since) / reliability(session) if since is not None else inf
        return served, self._drawn(since or 0, session.name)

    def _places_due(self, round: int, anybody: bool) -> int:
        """Return how many places are to change hands: in a turn all of them, one after the other."""
        if not anybody:
            self._due = 0.0
        elif round > self._round:
            self._due = min(self.places, self._due + self.places / self._length())
        self._round = max(self._round, round)
        return int(self._due)

    def _late(self, round: int, here: Sequence[Session]) -> int:
        """Count members that are late or compute a long lease: their places are kept for a while."""
        out = {s.id for s in here}
        turns = ((session, turn) for session, turn in self._turns.items() if turn.since is not None)
        return sum(session not in out and round - turn.until <= AWAY for session, turn in turns)

    def _nearest(self, round: int, ready: Sequence[Session], members: Sequence[Session]) -> list[Session]:
        """Return those with the fewest packets to fetch, where a round needs more members."""
        fewest = min(max(1, self._settings.min_peers), self.places)
        rest = sorted(self._line(ready, members), key=lambda s: round - s.at)
        return rest[: max(0, fewest - len(members))]


def reliability(session: Session) -> float:
    """Return the share of a peer's rounds that had its update, as if it had begun with one that did."""
    return (session.accepted + 1) / (session.accepted + session.left_out + 1)


def with_few_new(sessions: Sequence[Session], newcomers: int) -> list[Session]:
    """Leave out newcomers beyond so many, in the order of the sessions."""
    new = [s.id for s in sessions if not s.proven]
    out = {*new[max(0, newcomers) :]}
    return [s for s in sessions if s.id not in out]
