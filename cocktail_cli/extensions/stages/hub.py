"""The hub's coordination of lent machines: messages to the table of rings, and places to the machines."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from transport import actions as do
from transport.hub import HubParts
from transport.membership import FULL, Session, Standing
from transport.protocol import ProtocolError, UrlError, events, messages, read_msgpack
from transport.scheduling import HubExtension
from transport.wire import key_of, origin_of

from .bodies import NAME, Lends, OtherMachine, Placed, Probed, RingMachine, packed
from .events import Stages
from .lines import check_address, dials
from .ring_table import MOST, Lender, Ring, RingTable

if TYPE_CHECKING:
    from .compute import StageMemory

PROBE_S = 5.0  # for a new machine and those that are there to measure their lines
STANDS_BY = "stands by: it takes the place of a machine that is lost, or one in another ring"
WAITS = "waits until the machines that wait have the memory for the model"
UNDIVIDED = "this run's model is not divided among machines: its host can set stages={}"
OFFERS = "what a machine lends"
UNREACHED = "nobody reaches this machine at its address: it can stand between two that are reached alone"


@dataclass
class Machine:
    """A lent machine: what it has said, what it was told, and which of its lines are yet to be measured."""

    offer: Lends
    address: str  # that it names
    told: Placed | None = None  # the newest
    reachable: bool | None = None  # None: the hub dials it still
    prepared: bool = False  # has said Probed
    until: float | None = None  # its lines are measured until then; None: not yet, or no longer
    pairs: list[tuple[str, str]] = field(default_factory=list)  # to be measured: (dials, is dialled)


class Undivided(HubExtension):
    """Refuses machines, as stages cannot train the model of this run."""

    name, role = NAME, "stage"

    def admits(self, conn: bytes, body: bytes) -> messages.Refused:
        return messages.Refused("state", UNDIVIDED)


class RingCoordinator(HubExtension):
    """Lent machines of a run, which have sessions that train nothing."""

    name, role = NAME, "stage"

    def __init__(self, hub: HubParts, division: StageMemory) -> None:
        self._out, self._members, self._rounds = hub.out, hub.members, hub.rounds
        self._admission, self._asks = hub.admission, hub.settings.join == "approve"
        self.table = RingTable(division)
        self._machines: dict[str, Machine] = {}  # by session
        self._now = 0.0
        self._said: dict[str, Any] = {"rings": [], "waiting": []}  # to the host
        self._new = False  # the table has not ticked since a machine came or went

    def admits(self, conn: bytes, body: bytes) -> messages.Refused | bool:
        """Admit the machines that could be peers."""
        try:
            read_msgpack(body, Lends, OFFERS)
        except ProtocolError as error:
            return messages.Refused("state", str(error))
        if self._asks and self._admission.standing(key_of(conn)) is not Standing.MEMBER:
            return False
        return self._members.make_room(origin_of(conn)) or messages.Refused("full", FULL)

    def hello(self, session: Session, body: bytes, now: float) -> None:
        """Take a machine; one that names an address of its own, once that is tried. One behind
        another place is tried by those that measure their lines to it."""
        if session.role != self.role:
            return
        self._machines[session.id] = Machine(read_msgpack(body, Lends, OFFERS), session.address)
        self._members.tell_joined(session, self._rounds.round)
        if session.address and "/" not in session.address:
            self._out.add(do.Reach(session.id, session.address, session.key))
            return
        if not self._is_of(session, session.address):
            session.address = ""
        self._enter(session, reachable=bool(session.address))

    def _is_of(self, session: Session, address: str) -> bool:
        """Tell whether this is an address behind another place, and not of a machine that has another key."""
        try:
            check_address(address)
        except UrlError:
            return False
        there = self._members.present(list(self._machines))
        return all(other.address != address or other.key == session.key for other in there)

    def reached(self, session: Session, ok: bool) -> None:
        """Take the result of dialling a machine."""
        if not ok:
            session.address = ""
        self._enter(session, reachable=ok)

    def received(self, session: Session, body: bytes, now: float) -> None:
        """Take what a machine has measured of its lines; its first message says that it is prepared. A new
        one whose lines are all measured gets a place from now on. One that is not reached may be gone."""
        if session.id not in self._machines:
            raise ProtocolError(f"{session.name} lends nothing")
        m = read_msgpack(body, Probed, "what a machine has measured")
        self._machines[session.id].prepared = True
        self._meet(session)
        others = {other.address: other for other in self._there() if other.address and other is not session}
        for address in m.seconds.keys() & others.keys():
            seconds, other = m.seconds[address], others[address]
            self.table.measured(session.id, other.id, seconds if seconds >= 0 else inf)
            self._new = True
            if seconds < 0:
                self._measured(session.id, other.id)
                self._members.doubt(other.key, now)  # a head has two sessions
        for address in m.rates.keys() & others.keys():
            rates, other = m.rates[address], others[address]
            if self._measured(session.id, other.id):
                self.table.rated(session.id, other.id, rates.there)
                self.table.rated(other.id, session.id, rates.back)
        self._come_if_measured()

    def welcomed(self, session: Session) -> None:
        """Say its place again to a machine on a new connection."""
        machine = self._machines.get(session.id)
        if machine is not None and machine.told is not None:
            self._out.send(session.conn, messages.Extension(NAME, packed(machine.told)))

    def session_ended(self, session: Session) -> None:
        """Take out a machine whose session has ended."""
        if self._machines.pop(session.id, None) is None:
            return
        self.table.gone(session.id)
        self._new = True
        for machine in self._machines.values():
            machine.pairs = [pair for pair in machine.pairs if session.id not in pair]
        self._come_if_measured()

    def _there(self) -> list[Session]:
        """Return the machines that have places or wait, then the new ones whose lines are measured."""
        new = [id for id, machine in self._machines.items() if machine.until is not None]
        return self._members.present([*self.table.lenders, *new])

    def _enter(self, session: Session, *, reachable: bool) -> None:
        """Give a machine again at once the place that it had at the hub before; else it is a new one."""
        machine = self._machines[session.id]
        had, lender = machine.offer.had, Lender(session.id, machine.offer.memory, reachable)
        if had is not None and (ring := ring_of(had)) and self.table.restore(lender, ring, had.number):
            self._new = True
            return
        machine.reachable = reachable
        self._meet(session)

    def _meet(self, session: Session) -> None:
        """Let a new machine that is prepared and the others measure the lines between them; of two machines
        that are reached alike the new one dials."""
        machine, there = self._machines[session.id], self._there()
        if not machine.prepared or machine.reachable is None or session in there:
            return
        machine.until = self._now + PROBE_S
        for other in there[:MOST]:
            if dials(session.address, other.address, first=True):
                machine.pairs.append((session.id, other.id))
            elif session.address:
                machine.pairs.append((other.id, session.id))
        self._tell_all(other for pair in machine.pairs for other in reversed(pair))
        self._come_if_measured()

    def _measured(self, dialler: str, dialled: str) -> bool:
        """Note that a line is measured; returns False where that was not asked for."""
        found = [machine for machine in self._machines.values() if (dialler, dialled) in machine.pairs]
        for machine in found:
            machine.pairs.remove((dialler, dialled))
        return bool(found)

    def _come_if_measured(self) -> None:
        """Let those new machines have places whose lines are measured, or were to be until now."""
        for id, machine in self._machines.items():
            if machine.until is not None and (not machine.pairs or self._now >= machine.until):
                machine.until, machine.pairs = None, []
                self.table.come(Lender(id, machine.offer.memory, bool(machine.reachable)))
                self._tell_all(self.table.lenders)
                self._new = True

    # ---- time ----------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass, and tell machines their places."""
        self._now = now
        self._come_if_measured()
        for session in self._members.present(list(self._machines)) if self.table.waiting else ():
            if self._members.suspect(session, now):  # another may have its layers, so it is lost
                self._members.kick(session, "session", f"silent for {now - session.seen:.0f} s")
        if not self._new and now < self.table.deadline():
            return
        self._new = False
        self.table.tick(now, ring_names())
        changed, self.table.changed = self.table.changed, set()
        changed |= {one.id for one in self.table.waiting}  # rings may be there now, or gone
        self._tell_all(sorted(changed))
        if (said := self._rings()) != self._said:
            self._said = said
            self._out.tell(events.OfExtension(0.0, Stages(**said)))

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        until = [machine.until for machine in self._machines.values() if machine.until is not None]
        return -inf if self._new else min([self.table.deadline(), *until])

    def _tell_all(self, machines: Iterable[str]) -> None:
        """Tell machines their places, where that is news."""
        for session in self._members.present(machines):
            place, machine = self._placed(session), self._machines[session.id]
            if place != machine.told:
                machine.told = place
                self._out.send(session.conn, messages.Extension(NAME, packed(place)))

    def _placed(self, session: Session) -> Placed:
        ring, probe = self.table.ring_of(session.id), self._probe(session)
        if ring is None:
            hidden = self._machines[session.id].address and not session.address
            spare = bool(self.table.rings)
            why = STANDS_BY if spare else WAITS
            reason = f"{why}; {UNREACHED}" if hidden else why
            return Placed("", 0, [], reason, probe, spare)
        number = ring.machines.index(session.id)
        return Placed(ring.id, number, self._of(ring), probe=probe)

    def _probe(self, session: Session) -> list[OtherMachine]:
        """List the machines to which a machine's lines are to be measured now."""
        found = []
        for dialler, dialled in (pair for machine in self._machines.values() for pair in machine.pairs):
            if session.id == dialler:
                found += [OtherMachine(one.key, one.address) for one in self._members.present([dialled])]
            elif session.id == dialled:
                found += [OtherMachine(one.key, "") for one in self._members.present([dialler])]
        return found[:MOST]

    def _of(self, ring: Ring) -> list[RingMachine]:
        found = []
        for id, layers in zip(ring.machines, ring.layers, strict=True):
            session = self._members.get(id)
            who = (session.name, session.key, session.address) if session else ("", "", "")
            found.append(RingMachine(*who, layers.start, layers.stop))
        return found

    # ---- for people ----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Describe the rings, and the machines that wait, by the keys of `cocktail status --json`."""
        return {NAME: self._rings()}

    def _rings(self) -> dict[str, Any]:
        rings = [
            [
                {"name": one.name or None, "layers": [one.first, one.stop]}
                for one in self._of(self.table.rings[id])
            ]
            for id in sorted(self.table.rings)
        ]
        waiting = [session.name for session in self._members.present(one.id for one in self.table.waiting)]
        return {"rings": rings, "waiting": waiting}


def ring_of(had: Placed) -> Ring | None:
    """Read a place of an earlier hub as a ring; None where it has no layers that follow one another."""
    layers = tuple(range(one.first, one.stop) for one in had.machines)
    if not layers:
        return None
    starts = [0, *(one.stop for one in layers[:-1])]
    if [one.start for one in layers] != starts or any(one.stop < one.start for one in layers):
        return None
    return Ring(had.ring, ("",) * len(layers), layers)


def ring_names() -> Iterator[str]:
    """Yield names of rings that nobody can guess: a machine comes back to its place by that name."""
    while True:
        yield secrets.token_urlsafe(16)
