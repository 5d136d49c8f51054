"""What a hub takes of what peers upload: the update of the open round, the legacy of one that leaves, and a
little for nothing, from which a newcomer sees how fast its line is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport import actions as do
from transport.membership import Kind, Session, State
from transport.protocol import ERROR, HANDOFF, PART, SHARD, TRIAL, UPDATE, round_and_name, round_of
from transport.scheduling import Phase, owner_called

if TYPE_CHECKING:
    from .hub_state import HubState

TRIALS, LONGEST = 4, 4 << 20  # of a session; bytes of each


def refuses(hub: HubState, session_id: str, name: str, size: int) -> str | None:
    """Why this upload is not wanted, or None. One beyond the limit ends its session."""
    session, round, leaves = hub.members.get(session_id), round_of(UPDATE, name), False
    if session is None:
        return "the session is over"
    if round is not None:
        reason = refuses_update(hub, session, round)
    elif (part := round_and_name(PART, name)) is not None:
        reason = refuses_part(hub, session, *part)
    elif (shard := round_and_name(SHARD, name)) is not None:
        reason = refuses_shard(hub, session, *shard)
    elif round_of(HANDOFF, name) is not None:
        leaves, reason = True, refuses_legacy(hub, session)
    elif round_of(ERROR, name) is not None:
        reason = refuses_error(session)
    elif round_of(TRIAL, name) is not None:
        return refuses_trial(session, size)
    else:
        reason = f"nothing of the name {name!r} is wanted"
    if reason is None and size > hub.settings.update_limit:
        reason = f"its upload has {size} bytes, the limit of this run is {hub.settings.update_limit}"
        hub.members.kick(session, "kicked", reason)
    elif reason is None and leaves and session.state is not State.BEHIND:
        hub.members.move(session, Kind.LEAVING)
    return reason


def refuses_update(hub: HubState, session: Session, round: int) -> str | None:
    ex = hub.exchange
    if hub.phase is not Phase.OPEN or ex is None or ex.round != round or session.id not in ex.members:
        return f"round {round} is not open to this peer, or is closed"
    return "it is here already" if session.id in ex.uploads else None


def refuses_legacy(hub: HubState, session: Session) -> str | None:
    if hub.ending or hub.phase is Phase.FINAL:
        return "the run is ending: there is no round left to carry it"
    if session.share is None:
        return "no packet of this session is in the run"
    return "it is here already" if session.legacy else None


def refuses_part(hub: HubState, session: Session, round: int, name: str) -> str | None:
    """For an owner that this peer cannot reach."""
    ex = hub.exchange
    if hub.phase is not Phase.OPEN or ex is None or ex.round != round or session.id not in ex.members:
        return f"round {round} is not open to this peer, or is closed"
    owner = owner_called(ex, name)
    if owner is None:
        return f"{name!r} owns nothing in round {round}, or is lost"
    return "it is here already" if (owner, session.id) in ex.passed else None


def refuses_shard(hub: HubState, session: Session, round: int, attempt: str) -> str | None:
    ex = hub.exchange
    told = ex.closes.get(session.id) if ex is not None and ex.round == round else None
    if told is None or str(told.attempt) != attempt or hub.phase is not Phase.CLOSED:
        return f"attempt {attempt} of round {round} is not, or no more, what this owner is asked for"
    return None


def refuses_error(session: Session) -> str | None:
    """Of shards that a peer has owned; each time they change hands."""
    if not session.owned:
        return "this session has owned nothing that it has not handed over"
    return "the one before is being looked at" if session.handing else None


def refuses_trial(session: Session, size: int) -> str | None:
    if session.trials == TRIALS or size > LONGEST:
        return f"a session may try its line {TRIALS} times, with {LONGEST} bytes each"
    session.trials += 1
    return None


def inherit(hub: HubState, session_id: str, size: int) -> None:
    """A legacy is here, whole: it counts as the peer's packets did, by the hub's own arithmetic."""
    session = hub.members.get(session_id)
    if session is not None and session.share is not None and refuses_legacy(hub, session) is None:
        session.legacy = size
        to_all = hub.settings.owners == "peers"
        hub.out.add(do.Inherit(session.id, session.name, session.share, to_all))


def strike(hub: HubState, rejected: dict[str, str], keys: dict[str, str], *, at_once: bool) -> None:
    """Packets that could not be used, by their senders' names. `at_once`: there was no other in the round, so
    the senders go."""
    for name, reason in sorted(rejected.items()):
        hub.out.warn(f"its packet cannot be used: {reason}", name)
        out = hub.admission.strike(keys[name], name, reason)
        why = hub.admission.known[keys[name]].reason if out else f"its packet cannot be used: {reason}"
        for session in list(hub.members.sessions.values()):
            if session.key == keys[name] and (out or (at_once and session.name == name)):
                hub.members.kick(session, "kicked", why)
