"""What the hub answers to a connection that is no session, or not yet: greetings, and questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport import actions as do
from transport.membership import (
    CATCHING_UP,
    Act,
    Kind,
    Session,
    Standing,
    State,
    differences,
    refusal,
    same,
    wrong_run,
    wrong_token,
)
from transport.protocol import (
    PROTOCOL,
    AskStatus,
    AskStop,
    Hello,
    Over,
    Ready,
    Refused,
    Resume,
    Status,
    Welcome,
    events,
)
from transport.scheduling import Phase
from transport.wire import key_of, origin_of

from .final_evaluation import announce_part
from .run_status import status_text

if TYPE_CHECKING:
    from .hub_state import HubState

REPLACED = "another hub of this run has been started since"


Greeting = Hello | Resume | AskStatus | AskStop


def greet(hub: HubState, conn: bytes, message: Greeting, now: float) -> None:
    if message.run != hub.settings.run:
        hub.out.send(conn, wrong_run(message.run))
    elif isinstance(message, Hello | Resume) and hub.admission.standing(key_of(conn)) is Standing.BANNED:
        hub.out.send(conn, Refused("kicked", hub.admission.known[key_of(conn)].reason))
    elif isinstance(message, Hello):
        hello(hub, conn, message, now)
    elif isinstance(message, Resume):
        resume(hub, conn, message, now)
    elif isinstance(message, AskStatus):
        known = same(message.token, hub.token)
        hub.out.send(conn, Status(status_text(hub, now, message.recipe)) if known else wrong_token())
    elif not same(message.secret, hub.stop_secret):
        hub.out.send(conn, Refused("token", "only the owner of the run can stop it"))
    else:
        hub.out.send(conn, Over("stopping", hub.finished))
        how = "paused" if message.pause else "stopped"
        hub.end_by(f"{how} by its owner", now, at_once=message.now, pause=message.pause)


def hello(hub: HubState, conn: bytes, m: Hello, now: float, *, approved: bool = False) -> None:
    key = key_of(conn)
    standing, others = hub.admission.standing(key), hub.members.others(m.name, key)
    token = None if standing is Standing.MEMBER else hub.token
    refused = refusal(m, hub.settings, token, over=hub.ending, peers=others)
    if refused is not None:
        hub.out.send(conn, refused)
    elif not approved and not hub.admission.in_turn(conn, now):
        hub.members.refused += 1
    elif standing is not Standing.MEMBER and hub.settings.join == "approve":
        hub.admission.ask(conn, m, now)
    elif not hub.members.make_room(origin_of(conn)):
        hub.out.send(conn, Refused("full", f"{CATCHING_UP} others are catching up: try again later"))
    else:
        begin(hub, conn, m, now)


def begin(hub: HubState, conn: bytes, m: Hello, now: float) -> None:
    session = hub.members.begin(conn, m, now)
    hub.admission.move(session.key, Act.LET_IN, session.name)
    welcome(hub, session, resumed=False)
    look_for_door(hub, session)
    origin = session.origin.replace("-", ".")  # wire.origin_of has no dots
    hub.out.tell(events.PeerJoined(0.0, session.name, session.hardware, hub.round, origin))


def resume(hub: HubState, conn: bytes, m: Resume, now: float) -> None:
    """Everything that the peer may have missed is said again."""
    session, commits = hub.members.get(m.session), hub.history.commits
    if m.term > hub.term:
        member = hub.admission.standing(key_of(conn)) is Standing.MEMBER  # a stranger may say anything
        if member and not hub.replaced:
            hub.replaced = True
            hub.out.warn(f"{REPLACED} (term {m.term}, this one is of term {hub.term}): stop this one", m.name)
        hub.out.send(conn, Refused("term", REPLACED))
    elif hub.phase is Phase.ENDED:
        hub.out.send(conn, Over(hub.reason, hub.finished, hub.resumable))
    elif session is None or (session.name, session.key) != (m.name, key_of(conn)):
        hub.out.send(conn, Refused("session", "the hub does not know this session any more"))
    elif 0 <= m.waiting < hub.round and m.waiting not in commits:
        session.conn = conn
        hub.members.kick(session, "session", f"away since round {m.waiting}")
    else:
        if session.awaited:
            session.address, session.owns = m.address, m.owns and not m.address
            look_for_door(hub, session)
        hub.members.back(session, conn, now, ready=m.ready)
        give_back_unheard(hub, session, m.holds)
        welcome(hub, session, resumed=True)
        if m.waiting in commits:
            hub.out.send(conn, commits[m.waiting])
        if hub.phase is Phase.OPEN and hub.exchange is not None and session.id in hub.exchange.members:
            hub.announce(session, hub.exchange)
        elif hub.phase is Phase.CLOSED and hub.exchange is not None and session.id in hub.exchange.closes:
            hub.out.send(conn, hub.exchange.closes[session.id])
        elif hub.phase is Phase.FINAL:
            announce_part(hub, session)


def look_for_door(hub: HubState, session: Session) -> None:
    """Whoever says that others can reach it is dialled before it owns anything."""
    if session.address and hub.settings.owners == "peers":
        session.looked_for = True
        hub.out.add(do.Reach(session.id, session.address, session.key))


def said_ready(hub: HubState, session: Session, m: Ready, now: float) -> None:
    """A peer holds x' of a round. Is it the run's x', made from the run's files?"""
    joining = session.state is State.JOINING
    if differ := differences(m.holds, hub.settings.holds):
        hub.members.kick(session, "state", differ)
    elif m.round > hub.round or hub.history.differs(m.round, m.fingerprint):
        hub.members.kick_other_state(session, m.round)
    elif hub.members.move(session, Kind.READY) and joining:
        session.claims = (m.round, m.fingerprint)
        hub.out.tell(events.PeerReady(0.0, session.name, m.round, now - session.since))


def give_back_unheard(hub: HubState, session: Session, holds: list[int]) -> None:
    """A peer is back. Leases it never heard of return to the pool; that of the open round it is told."""
    ex = hub.exchange
    current = {ex.round} if ex is not None and session.id in ex.members else set()
    for lease in set(hub.leases.held(session.id)) - set(holds) - current:
        hub.give_back(session.id, lease)


def welcome(hub: HubState, session: Session, *, resumed: bool) -> None:
    s = hub.settings
    message = Welcome(
        protocol=PROTOCOL,
        run=s.run,
        name=session.name,
        session=session.id,
        recipe=s.recipe,
        recipe_hash=s.recipe_hash,
        base=list(s.base),
        round=hub.round,
        ping_s=s.ping_s,
        resumed=resumed,
        term=hub.term,
        log_bytes=hub.history.log_bytes,
        snapshots=hub.history.snapshots,
    )
    hub.out.send(session.conn, message)
