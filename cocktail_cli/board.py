"""The state of a run as one screen shows it: takes events, gives rows of text. No terminal in here."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from cocktail_cli.events import (
    Eval,
    Event,
    Joined,
    Left,
    PeerJoined,
    PeerLeft,
    Progressed,
    RunFinished,
    RunStarted,
    Step,
)

BARS = "▁▂▃▄▅▆▇█"
TOP = 10  # peers shown by name; the rest is a number


def sparkline(values: list[float], width: int = 24) -> str:
    """The last `width` values as bars, the smallest the lowest."""
    tail = values[-width:]
    low, span = min(tail, default=0.0), (max(tail, default=0.0) - min(tail, default=0.0)) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in tail)


def megabytes(count: float) -> str:
    """`812 B`, `34.1 kB`, `2.1 GB`: decimal, as links are sold."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def pace_of(event: Progressed) -> str:
    """`, 11.8 MB/s, 3 min left`: as much of it as is known."""
    if not event.rate or event.done >= event.total:
        return ""
    left = "" if event.eta is None else f", {spell(event.eta)} left"
    return f", {megabytes(event.rate)}/s{left}"


def spell(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def printable(text: str, limit: int = 120) -> str:
    """Text of a stranger, fit for a terminal: no control characters, no end."""
    return "".join(c if c.isprintable() else "?" for c in text)[:limit]


@dataclass
class PeerRow:
    hardware: str = ""
    state: str = "joining"
    up: int = 0  # bytes of the last round
    down: int = 0
    ratio: float = 0.0
    seen: float = 0.0  # monotonic seconds


@dataclass
class Board:
    """Everything on the screen."""

    run: str = ""
    recipe: str = ""
    step: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    eval_loss: float | None = None
    ratio: float = 0.0
    step_s: float = 0.0
    state: str = "starting"
    peers: dict[str, PeerRow] = field(default_factory=dict)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=3))

    def take(self, event: Event) -> None:
        """Let one event change the screen."""
        if isinstance(event, (RunStarted, Joined)):
            self.run, self.recipe = event.run, event.recipe
            self.steps = event.steps if isinstance(event, RunStarted) else self.steps
            self.state = "waiting for peers" if isinstance(event, RunStarted) else "joined"
        elif isinstance(event, PeerJoined):
            self.peers[event.peer] = PeerRow(event.hardware)
            self.said.append(f"{time.strftime('%H:%M:%S')} {event.peer} joined")
        elif isinstance(event, PeerLeft):
            self.peers.pop(event.peer, None)
            self.said.append(f"{time.strftime('%H:%M:%S')} {event.peer} left: {event.reason}")
        elif isinstance(event, Step):
            self.count(event)
        elif isinstance(event, Eval):
            self.eval_loss = event.loss
        elif isinstance(event, Progressed):
            share = f" {event.done * 100 // event.total} %" if event.total else ""
            self.state = event.state + share + pace_of(event)
        elif isinstance(event, (Left, RunFinished)):
            self.state = event.reason

    def count(self, event: Step) -> None:
        self.step, self.steps, self.state = event.step, event.steps, "training"
        self.ratio, self.step_s = event.ratio_fp16 or self.ratio, event.step_s or self.step_s
        if event.loss is not None:
            self.losses.append(event.loss)
        for name in event.up_bytes:
            row = self.peers.setdefault(name, PeerRow())
            row.up, row.down = event.up_bytes[name], event.down_bytes.get(name, 0)
            row.ratio = event.ratio_up.get(name, 0.0)
            row.state = "training" if name in event.accepted else "late"
            row.seen = time.monotonic()

    def title(self) -> str:
        share = f" · {100 * self.step // self.steps} %" if self.steps else ""
        left = self.step_s * (self.steps - self.step)
        eta = f" · ETA {int(left // 3600)}h {int(left % 3600 // 60):02d}m" if left > 0 else ""
        return f"{self.run} · {self.recipe} · step {self.step}/{self.steps}{share}{eta}"

    def summary(self) -> str:
        """One line that says how the run fares."""
        parts = [self.state]
        if self.losses:
            parts.append(f"loss {self.losses[-1]:.3f} {sparkline(self.losses)}")
        if self.eval_loss is not None:
            parts.append(f"eval {self.eval_loss:.3f}")
        if self.step_s:
            parts.append(f"{self.step_s:.1f} s a step")
        if self.ratio:
            parts.append(f"{self.ratio:.0f}x below FP16")
        return "   ".join(parts)

    def columns(self, wide: bool) -> list[str]:
        return (
            ["PEER", "HARDWARE", "STATE", "UP", "DOWN", "RATIO", "LAST"] if wide else ["PEER", "STATE", "UP"]
        )

    def rows(self, wide: bool) -> list[list[str]]:
        """A row a peer, by name; past TOP they are only counted."""
        rows = []
        for name in sorted(self.peers)[:TOP]:
            row = self.peers[name]
            last = f"{time.monotonic() - row.seen:.0f} s" if row.seen else "-"
            up, down = (megabytes(row.up), megabytes(row.down)) if row.seen else ("-", "-")
            ratio = f"{row.ratio:.0f}x" if row.ratio else "-"
            rows.append(
                [name, row.hardware, row.state, up, down, ratio, last] if wide else [name, row.state, up]
            )
        if len(self.peers) > TOP:
            rows.append([f"and {len(self.peers) - TOP} more"] + [""] * (len(self.columns(wide)) - 1))
        return rows

    def history(self) -> list[str]:
        return list(self.said)
