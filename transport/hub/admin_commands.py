"""Answers for people: to the host's commands (list, token, approve, deny, kick, ban, unban, stop), whose
secret is in run.json, and to `cocktail status`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from transport import actions as do
from transport.membership import KeyEvent, Roster, Session, Standing, Traffic, Visitor, same
from transport.protocol import TOKEN_BYTES, messages, short_key, to_bytes
from transport.scheduling import HubExtension, Rounds

from .handshake import Handshake, HubParts

Named = tuple[str, str]  # name, key
Answer = dict[str, Any]
Place = tuple[int, str]  # of a row in the list: its part of it, and what it is called there
PAGE, PAGE_BYTES = 512, 128 << 10  # rows of the list in one answer, and their JSON: half of a message
CHOICES = 8  # keys named where several have one name
WORDS = {
    "joining": "syncing",
    "ready": "waiting",
    "training": "training",
    "sent": "training",
    "apart": "training",
    "behind": "behind",
}
PEERS_BYTES = 128 << 10  # JSON of the peers in a status: half of a message, as the recipe is in it too


class UnknownPeer(Exception):
    """The host names a peer that is not there, or a name that several have."""


class AdminCommands:
    """Executes the host's commands."""

    def __init__(self, parts: HubParts, handshake: Handshake) -> None:
        self._out, self._members, self._admission = parts.out, parts.members, parts.admission
        self._rounds, self._handshake, self._secret = parts.rounds, handshake, parts.secret

    def stop(self, conn: bytes, m: messages.AskStop, now: float) -> None:
        """End or pause the run."""
        if not same(m.secret, self._secret):
            self._out.refuse(conn, "token", "only the run's host can stop it")
            return
        self._out.send(conn, messages.Over("stopping", self._rounds.over.finished))
        how = "paused" if m.pause else "stopped"
        self._rounds.stop(f"{how} by its host", now, at_once=m.now, pause=m.pause)

    def execute(self, conn: bytes, m: messages.AskAdmin, now: float) -> None:
        """Execute a command. The answer goes once its effects are in the ledger."""
        if not same(m.secret, self._secret):
            self._out.refuse(conn, "token", "only the run's host can ask this")
            return
        commands: dict[str, Callable[[], Answer]] = {
            "list": lambda: {"join": self._admission.settings.join, **self._list(m.peer, now)},
            "token": lambda: self._rotate(m.token),
            "approve": lambda: self._approve(m.peer, now),
            "deny": lambda: self._deny(m.peer, m.reason),
            "kick": lambda: self._kick(m.peer, m.reason, now, ban=False),
            "ban": lambda: self._kick(m.peer, m.reason, now, ban=True),
            "unban": lambda: self._unban(m.peer),
        }
        try:
            answer = commands[m.order]()
        except UnknownPeer as error:
            self._out.refuse(conn, "unknown", str(error))
        else:
            self._out.add(do.SendDurably(conn, messages.Status(json.dumps(answer))))

    # ---- commands ------------------------------------------------------------------------------------------

    def _kick(self, word: str, reason: str, now: float, *, ban: bool) -> Answer:
        """End the sessions of a peer. If several share a key, a name means one of them, except in a ban."""
        here, waiting = {(s.name, s.key) for s in self._members}, self._waiting
        key = key_of_one("peer", word, here, waiting, self._with_standing(Standing.MEMBER))
        all_sessions = self._members.with_key(key)
        sessions = [s for s in all_sessions if s.name == word and not ban] or all_sessions
        did = "banned" if ban else "kicked"
        why = f"{did} by the run's host" + (f": {reason}" if reason else "")
        name = (
            word if word != short_key(key) else next((n for n, k in sorted(here | waiting) if k == key), "")
        )
        self._admission.move(key, KeyEvent.BANNED if ban else KeyEvent.KICKED, name, why)
        for session in sessions:
            self._members.kick(session, "kicked", why)
        self._admission.dismiss(self._admission.waiting(key), messages.Refused("kicked", why))
        for one in self._rounds.extensions:
            one.removed(key)
        return done(did, key, [s.name for s in sessions] or [word])

    def _unban(self, word: str) -> Answer:
        key = key_of_one("banned peer", word, self._with_standing(Standing.BANNED))
        name = self._admission.known[key].name
        self._admission.move(key, KeyEvent.UNBANNED)
        self._rounds.forget_key(key)
        return done("unbanned", key, [name])

    def _approve(self, word: str, now: float) -> Answer:
        """Admit all connections that wait with one key."""
        key = key_of_one("peer that waits", word, self._waiting)
        asked = {conn: self._admission.asking[conn] for conn in self._admission.waiting(key)}
        names = [asking.name for asking in asked.values()]
        self._admission.move(key, KeyEvent.APPROVED, names[0])
        for conn, asking in asked.items():
            del self._admission.asking[conn]
            assert asking.hello is not None, "it asks"
            self._handshake.hello(conn, asking.hello, now, approved=True)
        return done("approved", key, names)

    def _deny(self, word: str, reason: str) -> Answer:
        key = key_of_one("peer that waits", word, self._waiting)
        names = [self._admission.asking[conn].name for conn in self._admission.waiting(key)]
        why = "the run's host says no" + (f": {reason}" if reason else "")
        self._admission.dismiss(self._admission.waiting(key), messages.Refused("approval", why))
        return done("denied", key, names)

    def _rotate(self, token: str) -> Answer:
        if len(to_bytes(token)) != TOKEN_BYTES:
            raise UnknownPeer(f"a token has {TOKEN_BYTES} bytes, not {len(to_bytes(token))}")
        self._admission.rotate(token)
        return {"did": "rotated"}

    # ---- names ---------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> set[Named]:
        return {(asking.name, asking.key) for asking in self._admission.asking.values()}

    def _with_standing(self, standing: Standing) -> set[Named]:
        return {(k.name, k.key) for k in self._admission.known.values() if k.standing == standing.value}

    # ---- the list ------------------------------------------------------------------------------------------

    def _list(self, after: str, now: float) -> Answer:
        """List sessions, waiting and deciding peers, those that have just left, banned ones, and members that
        are gone: a page of the rows beyond the place `after`, the next such place, and how many are left."""
        start, sessions = place_of(after), {session.key for session in self._members}
        makers = dict(self._rows(now))
        gone = {departure.session.key for departure in self._members.gone.values()}
        banned = Standing.BANNED.value
        others = [
            (4 if known.standing == banned else 3 if key in gone else 5, key)
            for key, known in self._admission.known.items()
            if (known.name and key not in sessions) or known.standing == banned
        ]
        beyond = [place for place in (*makers, *others) if place > start]
        places = heapq.nsmallest(PAGE, beyond)
        made = (makers[one]() if one in makers else self._row_of_key(one[1]) for one in places)
        rows = fitting(made, PAGE_BYTES)
        left = len(beyond) - len(rows)
        more = "{} {}".format(*places[len(rows) - 1]) if left else ""
        return {"peers": rows, "more": more, "left": left}

    def _rows(self, now: float) -> Iterator[tuple[Place, Callable[[], Answer]]]:
        """Yield the place of each row of a connection, and what makes it."""
        for session in self._members:
            yield (0, session.name), partial(self._row_of, session, now)
        for conn, one in self._admission.asking.items():
            told = one.name, one.key, "wants in", one.hardware, now - one.since
            yield (1, f"{one.key} {conn[-8:].hex()}"), partial(row, *told)
        for one in self._admission.deciding:
            told = one.name, one.key, "deciding", one.hardware, now - one.since
            yield (2, f"{one.key} {one.since}"), partial(row, *told)

    def _row_of_key(self, key: str) -> Answer:
        """Describe a key without a connection."""
        known = self._admission.known[key]
        departure = self._members.gone.get(known.name)
        banned = known.standing == Standing.BANNED.value
        went = None if banned or departure is None or departure.session.key != key else departure
        how = "banned" if banned else "gone" if went is None else went.how
        reason = known.reason if went is None else went.reason
        return row(known.name, key, how) | {"strikes": known.strikes, "reason": reason}

    def _row_of(self, s: Session, now: float) -> Answer:
        known, traffic = self._admission.known.get(s.key), self._members.traffic.get(s.id, Traffic())
        moved = {"strikes": known.strikes if known else 0, "up_bytes": traffic.up, "down_bytes": traffic.down}
        state = session_word(s, self._members.quiet)
        return row(s.name, s.key, state, s.hardware, now - s.since) | moved


def done(did: str, key: str, names: Iterable[str]) -> Answer:
    return {"did": did, "key": short_key(key), "peers": sorted(names)}


def key_of_one(what: str, word: str, *groups: set[Named]) -> str:
    """Find the key that a short key or a name means; of a name, the first group that has it decides."""
    keys = {key for group in groups for _, key in group if short_key(key) == word}
    for group in groups:
        keys = keys or {key for name, key in group if name == word}
    if not keys:
        raise UnknownPeer(f"no {what} is called {word!r}")
    if len(keys) > 1:
        choices = ", ".join(sorted(map(short_key, keys))[:CHOICES])
        more = f" and {len(keys) - CHOICES:,} more" if len(keys) > CHOICES else ""
        raise UnknownPeer(f"several are called {word!r}; say which key: {choices}{more}")
    return keys.pop()


def place_of(word: str) -> Place:
    """Read a place of the list; "": before its beginning. Raises UnknownPeer."""
    part, _, name = (word or "-1").partition(" ")
    if part not in ("-1", "0", "1", "2", "3", "4", "5"):
        raise UnknownPeer(f"no page of the list begins after {word!r}")
    return int(part), name


def row(name: str, key: str, state: str, gpu: str = "", since_s: float | None = None) -> Answer:
    since = None if since_s is None else round(since_s, 1)
    none = {"strikes": 0, "up_bytes": 0, "down_bytes": 0, "reason": ""}
    return {"name": name, "key": short_key(key), "gpu": gpu, "state": state, "since_s": since} | none


# ---- the status --------------------------------------------------------------------------------------------


def session_word(session: Session, over: bool) -> str:
    """Name a session's state. `over`: of the run, after which a peer that hangs up is done, not lost."""
    word = WORDS[session.state.value] if session.role == "peer" else session.role
    return "done" if over else word if session.conn else "lost"


def run_status(rounds: Rounds, now: float) -> dict[str, Any]:
    """Return the figures of a run, by the keys of `cocktail status --json`."""
    settings, history, elapsed = rounds.settings, rounds.history, rounds.elapsed(now)
    eta = None if rounds.state_word == "waiting" else rounds.eta_s(now)
    return {
        "run": settings.run,
        "recipe_hash": settings.recipe_hash,
        "parameters": settings.parameters,
        "local_steps": rounds.ladder.steps,
        "rung": settings.rungs[rounds.ladder.at].words,
        "need": rounds.need,
        "since_s": round(elapsed, 1),
        "state": rounds.state_word,
        "reason": rounds.over.reason,
        "step": rounds.step,
        "max_steps": settings.steps,
        "round": rounds.round,
        "loss": history.loss,
        "losses": history.curve.rounded,
        "eval_loss": history.eval_loss,
        "eval_losses": history.held_out.rounded,
        "grad_norm": history.grad_norm,
        "samples": rounds.leases.counted,
        "tokens": history.tokens,
        "tokens_per_s": round(rounds.rates(now)[1], 1),
        "checkpoint": history.snapshots[-1].round if history.snapshots else None,
        "eta_s": None if eta is None else round(eta),
    } | {key: of for one in rounds.extensions for key, of in one.status().items()}


def joiners_status(rounds: Rounds) -> dict[str, Any]:
    """Return what a joiner wants to know before it decides: the recipe, and what it would fetch and use."""
    settings, history = rounds.settings, rounds.history
    return {
        "recipe": settings.recipe,
        "base": msgspec.to_builtins(settings.base),
        "log_bytes": history.log_bytes,
        "snapshots": msgspec.to_builtins(history.snapshots),
        "needs": settings.needs,
        "licence": settings.licence,
    }


def people_status(
    members: Roster, visitors: Iterable[Visitor], extensions: Sequence[HubExtension], now: float
) -> dict[str, Any]:
    """Return the peers in the run, and the others: those that are deciding, have left, or were lost."""
    here = members.by_name()
    total = sum(p.tokens for p, _ in here) + sum(d.session.tokens for d in members.gone.values()) or 1

    def rows() -> Iterator[dict[str, Any]]:
        for p, t in here:
            row = peer_status(p, t, session_word(p, members.quiet), total, now)
            for one in extensions if p.conn and not members.quiet else ():
                row |= one.peer_status(p)
            yield row

    peers = fitting(rows(), PEERS_BYTES)
    gone = members.gone.values()
    others = [
        peer_status(d.session, d.traffic, d.how, total, now) | {"reason": d.reason, "rtt_ms": None}
        for d in gone
    ]
    deciding = [
        {"name": v.name, "gpu": v.hardware, "state": "deciding", "joined_s": round(now - v.since, 1)}
        for v in visitors
    ]
    told = {"peers": peers, "peer_count": len(here), "others": deciding + others}
    return told | {"refused": members.refused}


def fitting(rows: Iterable[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the first rows whose JSON has at most so many bytes, and one in any case."""
    found, size = list[dict[str, Any]](), 0
    for row in rows:
        size += len(json.dumps(row))
        if found and size > most:
            break
        found.append(row)
    return found


def peer_status(p: Session, traffic: Traffic, state: str, total: int, now: float) -> dict[str, Any]:
    """Return the figures of one peer. `total`: trained tokens of all."""
    return {
        "name": p.name,
        "gpu": p.hardware,
        "state": state,
        "share": round(p.tokens / total, 4),
        "tokens": p.tokens,
        "up_bytes": traffic.up,
        "down_bytes": traffic.down,
        "fetched_bytes": traffic.sums.fetched,
        "rtt_ms": None if p.rtt is None else round(p.rtt * 1000, 1),
        "last_seen_s": round(now - p.seen, 1),
        "joined_s": round(now - p.since, 1),
        "rounds": p.accepted,
        "left_out": p.left_out,
        "compute_s": round(p.compute_s, 3),
        "wait_s": round(p.wait_s, 3),
    }
