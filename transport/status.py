"""The answer to `cocktail status`: one JSON object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .history import Curve
    from .hub_state import HubState


@dataclass
class Traffic:
    """Bytes on the wire of one session, ZMTP and CURVE framing included."""

    up: int = 0  # peer to hub
    down: int = 0
    up_told: int = 0  # of which the last RoundCommitted knew
    down_told: int = 0

    def tell(self) -> tuple[int, int]:
        """(up, down) since this was last asked."""
        told = (self.up - self.up_told, self.down - self.down_told)
        self.up_told, self.down_told = self.up, self.down
        return told


WORDS = {
    "joining": "syncing",
    "ready": "waiting",
    "training": "training",
    "sent": "training",
    "apart": "training",
    "behind": "behind",
}


def status_text(hub: HubState, now: float) -> str:
    """The state of the run as JSON text, the keys of `cocktail status --json`."""
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
                "rtt_ms": None if p.rtt is None else round(p.rtt * 1000, 1),
                "last_seen_s": round(now - p.seen, 1),
            }
        )
    return json.dumps(
        {
            "run": s.run,
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
    )


def told(curve: Curve) -> list[tuple[int, float]]:
    return [(step, round(loss, 4)) for step, loss in curve.points]


def state_word(hub: HubState) -> str:
    if hub.phase.value == "ended":
        return "finished" if hub.finished else "failed"
    return "waiting" if hub.phase.value == "waiting" else "running"
