"""The answer to `cocktail status`: one JSON object, from plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from transport.membership import Roster, Session, Traffic, Visitor
from transport.scheduling import HubExtension, Rounds

WORDS = {
    "joining": "syncing",
    "ready": "waiting",
    "training": "training",
    "sent": "training",
    "apart": "training",
    "behind": "behind",
}
PEERS_BYTES = 128 << 10  # JSON of the peers in a status: half of a message, as the recipe is in it too


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
