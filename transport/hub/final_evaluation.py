"""What comes of evaluations, and how a run finishes: each part of the last one is computed by somebody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport import actions as do
from transport.membership import Kind, Session
from transport.protocol import Evaluated, Round, events
from transport.scheduling import Part

if TYPE_CHECKING:
    from .hub_state import HubState

DONE = "every sample was counted"


def evaluated(hub: HubState, session: Session, m: Evaluated) -> None:
    """A part has come."""
    ev = hub.evaluations.now
    known = ev is not None and ev.round == m.round
    if ev is None or not known or not ev.arrived(session.id, m.part, Part(m.loss_sum, m.tokens)):
        hub.members.ignored += 1
        return
    if ev.final:
        session.owes = None
        hub.members.move(session, Kind.ARRIVED)
        hub.members.move(session, Kind.CLOSED)
    if ev.whole:
        hub.evaluations.finish()
        if not ev.tokens:  # a mean over nothing is no number
            return
        hub.history.evaluated(ev.step, ev.loss)
        hub.out.add(do.Note(ev.round, ev.step, ev.loss, ev.tokens, ev.final))
        hub.out.tell(events.EvaluationDone(0.0, ev.round, ev.step, ev.loss, ev.tokens, ev.final))


def finish_or_wait(hub: HubState, now: float) -> None:
    """Every sample is counted: have each part of the final evaluation computed by somebody, then end."""
    if hub.evaluations.finished or not hub.evaluations.wanted:
        hub.end(DONE, 0, finished=True)
        return
    ready = hub.members.ready()
    for s in hub.evaluations.assign(hub.round, hub.settings.steps, [p.id for p in ready]):
        session = hub.members.sessions[s]
        session.owes = now
        hub.members.move(session, Kind.OPENED)
        announce_part(hub, session)
    ev = hub.evaluations.now
    if ready or (ev is not None and ev.awaited):
        hub.waiting_since = now
    elif now >= hub.waiting_since + hub.settings.start_timeout:
        hub.out.warn("the final evaluation was not completed: no peer is left")
        hub.end(DONE, 0, finished=True)


def announce_part(hub: HubState, session: Session) -> None:
    """Tell a peer (again) which part of the final evaluation is its."""
    ev = hub.evaluations.now
    part = ev.part_of(session.id) if ev is not None and ev.final else None
    if ev is not None and part is not None:
        sessions = hub.members.sessions
        names = sorted(sessions[s].name for s in ev.holders.values() if s in sessions)
        hub.out.send(session.conn, Round(ev.round, ev.step, ev.step, names, 0, False, part, ev.parts))
