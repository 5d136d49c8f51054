"""The hub's side of a standby, without I/O: what must be on its disk before a round is announced.

Round r is announced once the standby has stored the rounds up to r - lag: lag is 0 where the run is
replicated, 1 where it is asynchronous. A standby that takes over stores nothing more for this hub. So
whatever network and machines do, a hub that was replaced announces at most `lag` rounds that its standby
lacks, and then waits: there is no second history. Nothing of this depends on clocks or on votes.

    nobody follows   asynchronous: as without a standby. replicated: the first commit waits for one, but not
                     at a hub that has taken over: it is the second machine
    FOLLOWING        its copy has come so far that it counts; peers are told where it is. Once every session
                     has shown that it knows, the host is told that its machine may be lost
    LOST             the hub waits, and asks the standby's machine every two seconds whether it has taken over
    alone            asynchronous only: a majority of the voters has promised not to vote for the lost standby

Voters are the members of the newest round whose samples one of the last eight rounds counted, by key. The
host's own machine has no vote.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, cast

import msgspec

from transport.hub import HubParts
from transport.ledger import Counted
from transport.membership import Session
from transport.protocol import ProtocolError, messages, read_msgpack
from transport.scheduling import CommitSeconds, HubExtension, Lines
from transport.transfer import ObjectStore
from transport.wire import key_of

from .bodies import NAME, Backs, Follow, Grown, Standby, Stored
from .ledger_copy import TAKEN_OVER

if TYPE_CHECKING:
    from .hub_process import HubProcess

ASK_S = 2.0  # seconds between two questions to the machine of a lost standby
LOST_S = 10.0  # seconds after which the host is told, and an asynchronous hub asks its peers
REPLACED = 6  # exit code of a hub whose standby has taken over
RECENT = 8  # rounds whose voters are known
SAID = cast("type[Stored | Backs]", Stored | Backs)
FOLLOWS = "what a standby says of itself"


class Replication(HubExtension):
    """One run's standby, from its hub's view.

    Args:
        lag: rounds that may be announced before the standby has them.
        process: its `recorded` is the standby that the ledger names, as JSON; empty: none. It counts before
            it is back.
        refuses: why none can follow this run; empty: one can.
    """

    name = role = NAME
    copies = True

    def __init__(self, hub: HubParts, lag: int, process: HubProcess, refuses: str = "") -> None:
        self.settings, self._out, self._members, self._rounds = hub.settings, hub.out, hub.members, hub.rounds
        self._secret, self._process, self.lag = hub.secret, process, lag
        self._refuses, self._admission = refuses, hub.admission
        self.term = hub.recovered.term
        self.standby: Standby | None = None
        if process.recorded:
            self.standby = msgspec.json.decode(process.recorded, type=Standby)
        self.number = self.standby.number if self.standby else 0
        self.place = ""  # of the session that follows
        self.session = ""
        self.stored: int | None = None  # rounds on its disk; None: not known since this hub started
        self.durable = hub.rounds.round  # rounds on this hub's disk
        self.written = 0  # counts changes of the ledger
        self.waits = False  # a durable round waits for the standby
        self.approved: set[str] = set()  # keys that the host lets follow
        self.voters: Mapping[int, frozenset[str]] = {}  # rounds committed -> who votes then
        self.backers: set[str] = set()  # keys that have promised not to vote for the standby
        self.asked = False
        self._unaware: dict[str, float] = {}  # session -> when it was told of the newest standby, unanswered
        self._away: dict[str, float] = {}  # keys of those whose session has ended since -> when given up
        self._sure = self.number  # the host was told that everybody knows this one
        self._lost_at: float | None = None  # None: the next tick says
        self._ask_at, self._told = 0.0, False
        if self.standby is not None:
            self.approved.add(self.standby.key)

    def serve(self, objects: ObjectStore) -> None:
        """Serve the session that follows what it is to copy."""
        self._process.serve(objects, lambda session: session == self.session)

    def watch(self, lines: Lines) -> None:
        self._process.shell = lines

    # ---- sessions ------------------------------------------------------------------------------------------

    def admits(self, conn: bytes, body: bytes) -> messages.Refused | bool:
        """Let a standby follow that has the host's secret, or has followed before."""
        key = key_of(conn)
        try:
            follow = read_msgpack(body, Follow, FOLLOWS)
        except ProtocolError as error:
            return messages.Refused("state", str(error))
        if self._refuses:
            return messages.Refused("state", self._refuses)
        if self.standby is not None and self.standby.key != key:
            return messages.Refused(
                "full", "the run has another standby; its host can remove that one (kick)"
            )
        known = self._secret and hmac.compare_digest(follow.secret.encode(), self._secret.encode())
        return bool(known) or key in self.approved

    def answers(self, key: str, body: bytes) -> bool:
        """Answer no peer while a restarted hub has rounds that its standby must have before."""
        if body or self.standby is None or self._stored_enough(self.durable - 1):
            return True
        return self.standby.key == key

    def hello(self, session: Session, body: bytes, now: float) -> None:
        """Begin to feed a session that follows."""
        if session.role != self.role:
            return
        self.approved.add(session.key)
        self._admission.remember(session.key)
        self.session, self.place = session.id, read_msgpack(body, Follow, FOLLOWS).place
        if self.standby is not None and self.standby.place != self.place:
            self._enlist(session.key, now)

    def welcomed(self, session: Session) -> None:
        """Tell a peer where the standby is, and the standby what there is to fetch."""
        if session.id == self.session:
            self.wrote(self.durable)
        elif self.standby is not None:
            self._say(session, Standby(self.number) if self.asked else self.standby)
            if self._away.pop(session.key, None) is not None:
                self._unaware[session.id] = session.seen

    def _say(self, session: Session, body: Standby | Grown) -> None:
        self._out.send(session.conn, messages.Extension(NAME, msgspec.msgpack.encode(body)))

    def session_ended(self, session: Session) -> None:
        """Note the loss of the standby, or of a peer that may not know where it is."""
        if session.id == self.session:
            self.session, self._lost_at, self._told = "", None, False
        if self._unaware.pop(session.id, None) is not None:
            self._away[session.key] = inf  # the next tick says
        self._assure()

    def answered(self, session: Session, pinged: float) -> None:
        """Take a peer's answer to a ping of this time: what it was told before, it knows."""
        if pinged > self._unaware.get(session.id, pinged):
            del self._unaware[session.id]
            self._assure()

    def _assure(self) -> None:
        """Tell the host, once, that the standby has all and that every peer would look for it there."""
        following = self._members.get(self.session)
        if following is None or self.standby is None or self._sure == self.number:
            return
        if self._unaware or self._away:
            return
        self._sure = self.number
        told = f"the standby {following.name} at {self.place} has all of the run, and all peers know of it"
        self._out.warn(told, following.name)

    # ---- the standby's progress ----------------------------------------------------------------------------

    def wrote(self, rounds: int) -> None:
        """Note that the ledger has changed, and has so many rounds."""
        self.durable, self.written = rounds, self.written + 1
        session = self._members.get(self.session)
        if session is not None:
            self._say(session, Grown(self.written, rounds))

    def received(self, session: Session, body: bytes, now: float) -> None:
        """Take the word of the standby, or the promise of a peer."""
        said = read_msgpack(body, SAID, "what it says of a standby")
        if isinstance(said, Stored):
            self._has_stored(session, said.rounds, now)
        elif said.number == self.number and self.standby is not None:
            self.backers.add(session.key)
            if self.asked and self._majority():
                self._dismiss("a majority of the peers goes on without the standby")

    def _has_stored(self, session: Session, rounds: int, now: float) -> None:
        """Take the standby's word that its disk has so many rounds."""
        if session.id != self.session or rounds > self.durable:
            return
        self.stored = max(rounds, self.stored or 0)
        self.asked = False
        if self.standby is None and self._stored_enough(self.durable - 1):
            self._enlist(session.key, now)

    def _stored_enough(self, round: int) -> bool:
        return self.stored is not None and self.stored >= round + 1 - self.lag

    def _enlist(self, key: str, now: float) -> None:
        self.number += 1
        self.backers.clear()
        self._unaware = {session.id: now for session in self._members if session.id != self.session}
        self._away.clear()
        self._record(Standby(self.number, self.place, key))
        self._assure()

    def _record(self, standby: Standby) -> None:
        self.standby = standby if standby.place else None
        self._process.record(self.standby)
        self._tell(standby)

    def _tell(self, standby: Standby) -> None:
        for session in self._members:
            if session.id != self.session:
                self._say(session, standby)

    # ---- commits -------------------------------------------------------------------------------------------

    def counted(self, round: int, counted: Sequence[Counted], took: CommitSeconds) -> Mapping[str, bytes]:
        """Note who may elect a standby once this round is durable."""
        if voters := self._process.voters() - {self.settings.own_key}:
            newest = sorted(self.voters.items())[1 - RECENT :]
            self.voters = dict([*newest, (round + 1, voters)])  # another table: this is the commit thread
        return {}

    def may_announce(self, round: int) -> bool:
        """Tell whether the standby has what it must have. Who has taken over is the second machine, and waits
        for no third."""
        alone = self.lag == 1 or self.term >= TAKEN_OVER
        ready = alone if self.standby is None else self._stored_enough(round)
        self.waits = not ready
        return ready

    # ---- a lost standby ------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        if self._away:
            known = {key: min(until, now + self.settings.peer_timeout) for key, until in self._away.items()}
            self._away = {key: until for key, until in known.items() if now < until}
            self._assure()
        if self.standby is None or self.session:
            if self.standby is None and self.waits and not self._told:
                self._told = True
                self._out.warn("durability is replicated: the first round waits for a standby to follow")
            return
        if self._lost_at is None:
            self._lost_at = self._ask_at = now
        if now >= self._ask_at:
            self._ask_at = now + ASK_S
            self._process.ask(self.standby, self.visited)
        if now >= self._lost_at + LOST_S and not self._told:
            self._told = True
            self._out.warn(
                f"the standby at {self.standby.place} is lost: the run waits for it; `cocktail kick` of the "
                "standby, which must be ended first, lets it go on without"
            )
        if now >= self._lost_at + LOST_S and self.lag and self.stored is not None and not self.asked:
            self.asked = True
            self._tell(Standby(self.number))  # which asks for promises not to vote for it

    def _majority(self) -> bool:
        """Tell whether the promises outvote the standby, whichever round it has: no word of it came since."""
        assert self.stored is not None
        voters = self.voters
        last = [rounds for rounds in sorted(voters) if rounds <= self.stored][-1:]
        some = [of for rounds, of in voters.items() if rounds > self.stored or rounds in last]
        return bool(some) and all(2 * len(of & self.backers) > len(of) for of in some)

    def _dismiss(self, why: str) -> None:
        """Go on without the standby, which must be unable to take over."""
        self.asked, self.stored = False, None
        self._record(Standby(self.number))
        self._out.warn(why)

    def removed(self, key: str) -> None:
        """Note that the host has removed a peer: where it is the standby, the hub goes on without."""
        self.approved.discard(key)
        if self.standby is not None and self.standby.key == key:
            self._dismiss("the run goes on without its standby, which its host has removed")

    def ended(self) -> None:
        """Note that the run has ended in good order: a standby that hears that will not take over."""
        if self.standby is not None and self.session:
            self._record(Standby(self.number))

    def visited(self, term: int) -> None:
        """Take the term that the standby's machine has now. A higher one ends this hub: it is replaced."""
        if term <= self.term or self.standby is None:
            return
        where = f"the standby at {self.standby.place} has taken this run over (term {term})"
        for session in self._members:
            self._out.refuse(session.conn, "term", where)
        self._rounds.end(
            f"{where}; this hub of term {self.term} stops, and what it has since is void", REPLACED
        )

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        if self.standby is None or self.session:
            return inf
        if self._lost_at is None:
            return -inf
        return self._ask_at if self._told else min(self._ask_at, self._lost_at + LOST_S)
