"""The step event of a volunteer: this machine's own loss, times and bytes."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from cocktail_cli.ui import Baseline, events

if TYPE_CHECKING:
    from recipes.training import Peer, StepDone

    from .run_link import RunLink


PACE = 32  # steps over which the run's pace is measured


class StepMeter:
    """Measures each step from bytes and time at the end of the previous one."""

    def __init__(self, run: RunLink) -> None:
        self.run, self.before = run, run.traffic
        self.baseline: Baseline | None = None  # with the first step
        self.at: float | None = None  # end of the previous step; None: the start of the first is unknown
        # (monotonic seconds, step of the run) at the end of the last steps
        self.pace = deque[tuple[float, int]](maxlen=PACE)

    def measure(self, done: StepDone, peer: Peer) -> events.Step:
        now, (up, down) = time.monotonic(), self.run.traffic
        seconds = 0.0 if self.at is None else now - self.at
        sent, received = up - self.before[0], down - self.before[1]
        self.before, self.at = (up, down), now
        self.pace.append((now, done.step))
        name, announced = self.run.name, self.run.round
        self.baseline = self.baseline or Baseline(peer.trainer.layout.size)
        full = self.baseline.whole * done.local_steps
        both = self.baseline.add(done.sent_bytes, done.local_steps)
        return events.Step(
            step=done.step,
            steps=announced.steps if announced else 0,
            round=done.round,
            loss=done.loss,
            peers=announced.peers if announced else 0,
            tokens=done.tokens,
            accepted=[name] if done.accepted else [],
            up_bytes={name: sent},
            down_bytes={name: received},
            ratio_up={name: round(full / sent, 2)} if sent else {},
            ratio_down={name: round(full / received, 2)} if received else {},
            ratio_fp16=round(both / (sent + received), 2) if sent + received else 0.0,
            packet_bytes=done.sent_bytes,
            fingerprint=f"{done.fingerprint:016x}",
            step_s=round(seconds / done.local_steps, 3),
            compute_s={name: round(peer.compute_s / done.local_steps, 3)},
            wait_s={name: round(peer.wait_s / done.local_steps, 3)},
            local_steps=done.local_steps,
            lr=done.lr if done.loss is not None else None,
            grad_norm=done.grad_norm,
            eta_s=self.eta_s(announced.steps) if announced else None,
        )

    def eta_s(self, steps: int) -> float | None:
        """Estimate the seconds to the end from the run's steps, which are not this machine's alone."""
        (began, first), (now, last) = self.pace[0], self.pace[-1]
        return round((steps - last) * (now - began) / (last - first), 1) if last > first else None
