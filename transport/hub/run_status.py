"""The answer to `cocktail status`: one JSON object, from plain data."""

from __future__ import annotations

from typing import Any

from transport.membership import Session
from transport.protocol import Traffic
from transport.scheduling import Rounds

WORDS = {
    "joining": "syncing",
    "ready": "waiting",
    "training": "training",
    "sent": "training",
    "apart": "training",
    "behind": "behind",
}


def session_word(session: Session) -> str:
    return WORDS[session.state.value] if session.conn else "lost"


def run_status(rounds: Rounds, peers: list[dict[str, Any]], refused: int, now: float) -> dict[str, Any]:
    """Return the figures of a run, by the keys of `cocktail status --json`."""
    settings, history, elapsed = rounds.settings, rounds.history, rounds.elapsed(now)
    remaining, rate = settings.samples - rounds.leases.counted, rounds.samples_per_s(now)
    return {
        "run": settings.run,
        "recipe_hash": settings.recipe_hash,
        "parameters": settings.parameters,
        "local_steps": settings.local_steps,
        "since_s": round(elapsed, 1),
        "state": rounds.state_word,
        "step": rounds.step,
        "max_steps": settings.steps,
        "round": rounds.round,
        "loss": history.loss,
        "losses": history.curve.rounded,
        "eval_loss": history.eval_loss,
        "eval_losses": history.held_out.rounded,
        "tokens": history.tokens,
        "tokens_per_s": round(history.tokens / elapsed, 1),
        "peers": peers,
        "refused": refused,
        "checkpoint": history.snapshots[-1].round if history.snapshots else None,
        "eta_s": round(remaining / rate) if rate > 0 else None,
    }


def peers_status(peers: list[tuple[Session, Traffic]], now: float) -> list[dict[str, Any]]:
    """Return the figures of each peer."""
    total = sum(p.tokens for p, _ in peers) or 1
    return [
        {
            "name": p.name,
            "gpu": p.hardware,
            "state": session_word(p),
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
        for p, traffic in peers
    ]
