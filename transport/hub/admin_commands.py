"""What the owner asks of a hub, and what becomes of it. Who has the secret of run.json is the owner."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transport import actions as do
from transport.membership import Act, Session, Standing, same, wrong_run, wrong_token
from transport.protocol import TOKEN_BYTES, AskAdmin, Refused, Status, Traffic, short_key, to_bytes
from transport.wire import key_of

from .handshake import hello
from .run_status import WORDS

if TYPE_CHECKING:
    from .hub_state import HubState

Named = tuple[str, str]  # name, key


class Nobody(Exception):
    """The owner means a peer that is not there, or one of several."""


def ordered(hub: HubState, conn: bytes, m: AskAdmin, now: float) -> None:
    """Do what the owner asks. The answer goes when it is in the ledger."""
    if not same(m.secret, hub.stop_secret):
        hub.out.send(conn, Refused("token", "only the owner of the run can ask this"))
        return
    if m.run != hub.settings.run:
        hub.out.send(conn, wrong_run(m.run))
        return
    try:
        if m.order == "list":
            done: dict[str, Any] = {"join": hub.settings.join, "peers": listed(hub, now)}
        elif m.order == "token":
            done = rotate(hub, m.token)
        elif m.order == "approve":
            done = approve(hub, m.peer, now)
        elif m.order == "deny":
            done = deny(hub, m.peer, m.reason)
        elif m.order == "unban":
            done = unban(hub, m.peer)
        else:
            done = send_away(hub, m.peer, m.reason, ban=m.order == "ban")
    except Nobody as error:
        hub.out.send(conn, Refused("unknown", str(error)))
        return
    hub.out.add(do.SayDurably(conn, Status(json.dumps(done))))


# ---- orders ------------------------------------------------------------------------------------------------


def send_away(hub: HubState, word: str, reason: str, *, ban: bool) -> dict[str, Any]:
    """End the sessions of a peer. Of several with one key a name means one of them, but to a ban."""
    here = {(s.name, s.key) for s in hub.members.sessions.values()}
    key = key_of_one("peer", word, here, waiting(hub), with_standing(hub, Standing.MEMBER))
    mine = [s for s in hub.members.sessions.values() if s.key == key]
    meant = [s for s in mine if s.name == word and not ban] or mine
    did = "banned" if ban else "kicked"
    why = f"{did} by the run's owner" + (f": {reason}" if reason else "")
    name = (
        word if word != short_key(key) else next((n for n, k in sorted(here | waiting(hub)) if k == key), "")
    )
    hub.admission.move(key, Act.BANNED if ban else Act.KICKED, name, why)
    for session in meant:
        hub.members.kick(session, "kicked", why)
    hub.admission.dismiss(hub.admission.waiting(key), Refused("kicked", why))
    return told(did, key, [s.name for s in meant] or [word])


def unban(hub: HubState, word: str) -> dict[str, Any]:
    key = key_of_one("banned peer", word, with_standing(hub, Standing.BANNED))
    name = hub.admission.known[key].name
    hub.admission.move(key, Act.UNBANNED)
    return told("unbanned", key, [name])


def approve(hub: HubState, word: str, now: float) -> dict[str, Any]:
    """Let in all that wait with one key."""
    key = key_of_one("peer that waits", word, waiting(hub))
    conns = {conn: hub.admission.asking[conn] for conn in hub.admission.waiting(key)}
    names = [asking.name for asking in conns.values()]
    hub.admission.move(key, Act.YES, names[0])
    for conn, asking in conns.items():
        del hub.admission.asking[conn]
        hello(hub, conn, asking.hello, now, approved=True)
    return told("approved", key, names)


def deny(hub: HubState, word: str, reason: str) -> dict[str, Any]:
    key = key_of_one("peer that waits", word, waiting(hub))
    names = [hub.admission.asking[conn].name for conn in hub.admission.waiting(key)]
    said = "the run's owner says no" + (f": {reason}" if reason else "")
    hub.admission.dismiss(hub.admission.waiting(key), Refused("approval", said))
    return told("denied", key, names)


def rotate(hub: HubState, token: str) -> dict[str, Any]:
    """From now on newcomers need this token. Those who wait came with the old one."""
    if len(to_bytes(token)) != TOKEN_BYTES:
        raise Nobody(f"a token has {TOKEN_BYTES} bytes, not {len(to_bytes(token))}")
    hub.token = token
    hub.admission.dismiss(hub.admission.asking, wrong_token())
    return {"did": "rotated"}


def told(did: str, key: str, names: Iterable[str]) -> dict[str, Any]:
    return {"did": did, "key": short_key(key), "peers": sorted(names)}


# ---- whom the owner means ----------------------------------------------------------------------------------


def waiting(hub: HubState) -> set[Named]:
    return {(asking.name, key_of(conn)) for conn, asking in hub.admission.asking.items()}


def with_standing(hub: HubState, standing: Standing) -> set[Named]:
    return {(k.name, k.key) for k in hub.admission.known.values() if k.standing == standing.value}


def key_of_one(what: str, word: str, *groups: set[Named]) -> str:
    """The key that the owner means by a short key, or by a name: the first group that has it decides."""
    keys = {key for group in groups for _, key in group if short_key(key) == word}
    for group in groups:
        keys = keys or {key for name, key in group if name == word}
    if not keys:
        raise Nobody(f"no {what} is called {word!r}")
    if len(keys) > 1:
        raise Nobody(f"several are called {word!r}; say which key: {', '.join(sorted(map(short_key, keys)))}")
    return keys.pop()


# ---- the list ----------------------------------------------------------------------------------------------


def listed(hub: HubState, now: float) -> list[dict[str, Any]]:
    """Everybody the hub knows: those who are here, who wait, who were here, who are banned."""
    sessions = sorted(hub.members.sessions.values(), key=lambda s: s.name)
    rows = [row_of(hub, session, now) for session in sessions]
    for conn, asking in hub.admission.asking.items():
        rows.append(row(asking.name, key_of(conn), "wants in", asking.hello.hardware, now - asking.since))
    present = {session.key for session in sessions}
    for known in sorted(hub.admission.known.values(), key=lambda k: (k.name, k.key)):
        if known.standing == Standing.BANNED.value:
            rows.append(
                row(known.name, known.key, "banned") | {"strikes": known.strikes, "reason": known.reason}
            )
        elif known.name and known.key not in present:
            why = {"strikes": known.strikes, "reason": hub.members.gone.get(known.name, "")}
            rows.append(row(known.name, known.key, "gone") | why)
    return rows


def row_of(hub: HubState, s: Session, now: float) -> dict[str, Any]:
    traffic = hub.members.traffic.get(s.id, Traffic())
    known = hub.admission.known.get(s.key)
    moved = {"strikes": known.strikes if known else 0, "up_bytes": traffic.up, "down_bytes": traffic.down}
    state = WORDS[s.state.value] if s.conn else "lost"
    return row(s.name, s.key, state, s.hardware, now - s.since) | moved


def row(name: str, key: str, state: str, gpu: str = "", since_s: float | None = None) -> dict[str, Any]:
    since = None if since_s is None else round(since_s, 1)
    none = {"strikes": 0, "up_bytes": 0, "down_bytes": 0, "reason": ""}
    return {"name": name, "key": short_key(key), "gpu": gpu, "state": state, "since_s": since} | none
