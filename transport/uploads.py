"""What a hub takes of what peers upload: the update of the open round, the legacy of one that leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import actions as do
from .rounds import Phase
from .sessions import Kind, Session, State

if TYPE_CHECKING:
    from .hub_state import HubState

UPDATE, LEGACY = "update/", "legacy/"  # each followed by a round


def refuses(hub: HubState, session_id: str, name: str, size: int) -> str | None:
    """Why this upload is not wanted, or None. One beyond the limit ends its session."""
    session, round = hub.members.get(session_id), round_of(UPDATE, name)
    if session is None:
        return "the session is over"
    if round is not None:
        reason = refuses_update(hub, session, round)
    elif round_of(LEGACY, name) is not None:
        reason = refuses_legacy(hub, session)
    else:
        reason = f"nothing of the name {name!r} is wanted"
    if reason is None and size > hub.settings.update_limit:
        reason = f"its upload has {size} bytes, the limit of this run is {hub.settings.update_limit}"
        hub.members.kick(session, "kicked", reason)
    elif reason is None and round is None and session.state is not State.BEHIND:
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


def inherit(hub: HubState, session_id: str, size: int) -> None:
    """A legacy is here, whole: it counts as the peer's packets did, by the hub's own arithmetic."""
    session = hub.members.get(session_id)
    if session is not None and session.share is not None and refuses_legacy(hub, session) is None:
        session.legacy = size
        hub.out.add(do.Inherit(session.id, session.name, session.share))


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


def round_of(prefix: str, name: str) -> int | None:
    """The number in "update/17"; None where the name is another."""
    digits = name.removeprefix(prefix)
    plain = name.startswith(prefix) and digits.isascii() and digits.isdigit() and len(digits) < 19
    return int(digits) if plain else None
