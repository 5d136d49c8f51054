"""The answer to `cocktail status`: one JSON object."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transport.protocol import Traffic

if TYPE_CHECKING:
    from .hub_state import HubState
    from .round_history import Curve


WORDS = {
    "joining": "syncing",
    "ready": "waiting",
    "training": "training",
    "sent": "training",
    "apart": "training",
    "behind": "behind",
}


def status_text(hub: HubState, now: float, recipe: bool = False) -> str:
    """The state of the run as JSON text, the keys of `cocktail status --json`. `recipe`: its text, too."""
    s, elapsed = hub.settings, max(1e-9, now - hub.started)
    total = sum(p.tokens for p in hub.members.sessions.values()) or 1
    remaining = s.samples - hub.leases.counted
    rate = (hub.leases.counted - hub.counted_at_start) / elapsed  # samples per second
    peers = []
    for p in sorted(hub.members.sessions.values(), key=lambda p: p.name):
        t = hub.members.traffic.get(p.id, Traffic())
        peers.append(
            {
                "name": p.name,
                "gpu": p.hardware,
                "state": WORDS[p.state.value] if p.conn else "lost",
                "share": round(p.tokens / total, 4),
                "tokens": p.tokens,
                "up_bytes": t.up,
                "down_bytes": t.down,
                "fetched_bytes": t.sums.fetched,
                "rtt_ms": None if p.rtt is None else round(p.rtt * 1000, 1),
                "last_seen_s": round(now - p.seen, 1),
                "joined_s": round(now - p.since, 1),
                "rounds": p.accepted,
                "left_out": p.left_out,
                "compute_s": round(p.compute_s, 3),
                "wait_s": round(p.wait_s, 3),
            }
        )
    return json.dumps(
        {
            "run": s.run,
            "recipe_hash": s.recipe_hash,
            "parameters": s.parameters,
            "local_steps": s.local_steps,
            "since_s": round(elapsed, 1),
            "state": state_word(hub),
            "step": hub.step,
            "max_steps": s.steps,
            "round": hub.round,
            "loss": hub.history.loss,
            "losses": told(hub.history.curve),
            "eval_loss": hub.history.eval_loss,
            "eval_losses": told(hub.history.held_out),
            "tokens": hub.history.tokens,
            "tokens_per_s": round(hub.history.tokens / elapsed, 1),
            "peers": peers,
            "refused": hub.members.refused,
            "checkpoint": hub.history.snapshots[-1].round if hub.history.snapshots else None,
            "eta_s": round(remaining / rate) if rate > 0 else None,
        }
        | ({"recipe": s.recipe} if recipe else {})
    )


def told(curve: Curve) -> list[tuple[int, float]]:
    return [(step, round(loss, 4)) for step, loss in curve.points]


def state_word(hub: HubState) -> str:
    if hub.phase.value == "ended":
        ended = hub.finished or (hub.round and not hub.resumable)  # a run that its owner stops has a model
        return "finished" if ended else "paused" if hub.paused else "failed"
    return "waiting" if hub.phase.value == "waiting" else "running"
