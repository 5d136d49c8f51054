"""The screen of a run as lines of text, computed from events. This module knows no terminal."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from . import events

BARS = "▁▂▃▄▅▆▇█"
TOP = 10  # peers shown by name; the others are only counted
LOW = 15  # terminals with fewer lines get one line, no table
WIDE = 79  # columns that the full table needs
OF_LATE = 60.0  # seconds over which rates are averaged
STALE = 5.0  # seconds after which progress without news is dropped
COLUMNS = ("PEER", "GPU", "STATE", "TOK/S", "UP/S", "DOWN/S", "RTT", "SHARE", "LAST")
NARROW = ("PEER", "GPU", "STATE", "TOK/S", "UP/S", "SHARE")
SLIM = ("PEER", "STATE", "TOK/S", "SHARE")  # for the narrowest terminals
WIDE_ENOUGH = 56  # columns that NARROW needs
WORDS = ("PEER", "GPU", "STATE")  # left-aligned columns
FIXED = {"STATE": 8, "TOK/S": 6, "UP/S": 6, "DOWN/S": 6, "RTT": 6, "SHARE": 5, "LAST": 5}


def sparkline(values: list[float], width: int = 24) -> str:
    """Draw the last `width` values as bars of eight heights."""
    tail = values[-width:]
    low, span = min(tail, default=0.0), (max(tail, default=0.0) - min(tail, default=0.0)) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in tail)


def megabytes(count: float) -> str:
    """Format bytes in decimal units, as links are sold: `812 B`, `34.1 kB`, `2.1 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def short(count: float) -> str:
    """Format a count in three digits: `812`, `34k`, `2.1M`."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5 or unit == "G":
            break
        count /= 1000
    return f"{count:.0f}{unit}" if count >= 99.5 or unit == "" else f"{count:.1f}{unit}"


def counted(count: int, what: str) -> str:
    """Format a count with its noun: `1 peer`, `2 peers`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def amount(count: float, unit: str) -> str:
    return megabytes(count) if unit == "bytes" else f"{count:,.0f} {unit}".rstrip()


def progress_text(event: events.Progressed) -> str:
    """Format progress as ` 3.1 MB of 12.1 GB`, or ` 3.1 MB` where the total is unknown."""
    if not event.total:
        return f" {amount(event.done, event.unit)}" if event.rate else ""
    done = megabytes(event.done) if event.unit == "bytes" else f"{event.done:,}"
    return f" {done} of {amount(event.total, event.unit)}"


def rate_text(event: events.Progressed) -> str:
    """Format the rate and the time left, as far as they are known: `, 11.8 MB/s, 3 min left`."""
    if not event.rate or (event.total and event.done >= event.total):
        return ""
    left = "" if event.eta is None else f", {duration_text(event.eta)} left"
    return f", {amount(event.rate, event.unit)}/s{left}"


def progress_bar(event: events.Progressed, width: int) -> str:
    """Draw one line: `fetching the base  ━━━━━━━━─────  3.1 MB of 12.1 GB, 61 MB/s, 3 min left`."""
    said = f"{progress_text(event)}{rate_text(event)}"
    room = min(40, width - len(event.state) - len(said) - 3)
    if not event.total or room < 5:
        return f"{event.state}{said}"
    full = room * min(event.done, event.total) // event.total
    return f"{event.state}  {'━' * full}{'─' * (room - full)} {said}"


def duration_text(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def printable(text: str, limit: int = 120) -> str:
    """Make a stranger's text safe for a terminal: replace control characters and cut it at `limit`."""
    return "".join(c if c.isprintable() else "?" for c in text)[:limit]


@dataclass
class PeerRow:
    """A peer's line in the table."""

    hardware: str = ""
    state: str = "syncing"
    share: float | None = None  # share of the trained tokens
    rtt: float | None = None  # ms
    seen: float = 0.0  # monotonic seconds; 0: never
    # (monotonic seconds, tokens, bytes up, bytes down), sums since it joined
    sums: deque[tuple[float, float, float, float]] = field(default_factory=deque)

    def add(self, now: float, tokens: float, up: float, down: float) -> None:
        self.sums.append((now, tokens, up, down))
        while len(self.sums) > 2 and self.sums[1][0] < now - OF_LATE:
            self.sums.popleft()

    def rates(self) -> tuple[float, ...] | None:
        """Compute tokens, bytes up and bytes down per second of late; None before two samples."""
        if len(self.sums) < 2 or (span := self.sums[-1][0] - self.sums[0][0]) <= 0:
            return None
        first, last = self.sums[0], self.sums[-1]
        return tuple((b - a) / span for a, b in zip(first[1:], last[1:], strict=True))

    def cells(self, name: str, now: float) -> dict[str, str]:
        rates = self.rates()
        tokens, up, down = ["-"] * 3 if rates is None else map(short, rates)
        last = "-" if not self.seen else f"{max(0.0, now - self.seen):.0f} s"
        rtt = "-" if self.rtt is None else f"{self.rtt:.0f} ms"
        share = "-" if self.share is None else f"{100 * self.share:.0f}%"
        values = (name, self.hardware, self.state, tokens, up, down, rtt, share, last)
        return dict(zip(COLUMNS, values, strict=True))


@dataclass
class Board:
    """The state behind the screen; events and hub answers change it."""

    run: str = ""
    recipe: str = ""
    me: str = ""  # this machine's name in the run, if it joined as a peer
    watched: bool = False  # this process only watches: all it knows are the hub's answers
    step: int = 0
    steps: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    evals: list[float] = field(default_factory=list)
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    lr: float | None = None
    grad_norm: float | None = None
    moved: float = 0.0  # bytes exchanged so far, both ways, all members; downloads of joiners excluded
    full: float = 0.0  # bytes that FP16 would have taken
    state: str = "starting"
    progress: events.Progressed | None = None
    progressed: float = 0.0  # time of the last Progressed
    peers: dict[str, PeerRow] = field(default_factory=dict)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=3))

    def take(self, event: events.Event) -> None:
        """Apply one event."""
        match event:
            case events.RunStarted():
                self.run, self.recipe, self.steps, self.me = event.run, event.recipe, event.steps, ""
                self.state = "waiting for peers"
            case events.Joined():
                self.run, self.recipe, self.me, self.state = event.run, event.recipe, event.peer, "joined"
            case events.PeerJoined():
                self.peers[event.peer] = PeerRow(event.hardware)
                self.note(f"{event.peer} joined")
            case events.PeerReady():
                self.peers.setdefault(event.peer, PeerRow()).state = "waiting"
            case events.PeerLeft():
                self.peers.pop(event.peer, None)
                self.note(f"{event.peer} left: {event.reason.removeprefix('left: ')}")
            case events.Step():
                self.count(event)
            case events.Eval():
                self.evals.append(event.loss)
            case events.Progressed():
                measured = event.total > 0 or event.rate > 0
                self.progress, self.progressed = (event if measured else None), time.monotonic()
                self.state = self.state if measured and self.losses else event.state
            case events.Left() | events.RunFinished() | events.RunPaused():
                self.state = event.reason

    def note(self, what: str) -> None:
        self.said.append(f"{time.strftime('%H:%M:%S')} {what}")

    def count(self, event: events.Step) -> None:
        self.step, self.steps, self.state = event.step, event.steps, "training"
        self.step_s = event.step_s or self.step_s
        if not self.me:  # a peer's steps count its own tokens only; the hub reports the sum
            self.tokens = event.tokens or self.tokens
        self.compute_s = median(event.compute_s.values()) if event.compute_s else self.compute_s
        self.wait_s = median(event.wait_s.values()) if event.wait_s else self.wait_s
        self.lr, self.grad_norm = event.lr, event.grad_norm
        if event.loss is not None:
            self.losses.append(event.loss)
        up, down, fetched = event.up_bytes, event.down_bytes, event.fetched_bytes
        members = event.ratio_up.keys() | event.ratio_down.keys()
        moved = sum(up.get(peer, 0) + down.get(peer, 0) - fetched.get(peer, 0) for peer in members)
        self.moved, self.full = self.moved + moved, self.full + event.ratio_fp16 * moved
        now = time.monotonic()
        for name in event.up_bytes:
            row = self.peers.setdefault(name, PeerRow())
            row.state, row.seen = "training" if name in event.accepted else "late", now

    def look(self, status: Mapping[str, Any]) -> None:
        """Apply a hub's answer to `cocktail status`: the peers as they are now, with their sums."""
        now, there = time.monotonic(), {printable(str(peer["name"])): peer for peer in status["peers"]}
        for name in self.peers.keys() - there.keys():
            del self.peers[name]
        for name, peer in there.items():
            row = self.peers.setdefault(name, PeerRow())
            row.hardware, row.state = printable(str(peer["gpu"])), printable(str(peer["state"]))
            row.share, row.rtt, row.seen = peer["share"], peer["rtt_ms"], now - peer["last_seen_s"]
            row.add(now, peer.get("tokens", 0), peer["up_bytes"], peer["down_bytes"])
        self.tokens = status.get("tokens") or self.tokens
        if self.watched:
            self.state, self.losses = status["state"], [loss for _, loss in status.get("losses", ())]
            left = status["max_steps"] - status["step"]
            self.step_s = (status.get("eta_s") or 0.0) / max(1, left)
        if self.watched or not self.losses:  # a joiner before its first step
            self.step, self.steps = status.get("step", self.step), status.get("max_steps", self.steps)
        loss = status.get("eval_loss")
        if loss is not None and self.evals[-1:] != [loss]:
            self.evals.append(loss)

    # ---- out -----------------------------------------------------------------------------------------------

    def screen(self, width: int, height: int) -> list[str]:
        """Lay the state out for a terminal of this size; the caller cuts lines that are too long."""
        if height < LOW:
            return [self.one_line(width)]
        numbers = [*flowed(self.numbers(width), width), *flowed(self.times(), width)]
        top, foot = [self.title(width), *numbers, *self.underway(width)], flowed([self.keys()], width)
        table = self.table(width, max(1, height - len(top) - len(self.said) - len(foot) - 3))
        return [*top, *table, *self.said, *foot]

    def one_line(self, width: int) -> str:
        if line := self.underway(width):
            return line[0]
        share = f"step {self.step}/{self.steps} " if self.steps else ""
        loss = f" loss {self.losses[-1]:.3f}" if self.losses else ""
        whole = f"{share}{self.state}{loss}{self.left()} · {counted(len(self.peers), 'peer')}"
        return whole if len(whole) <= width or not self.losses else f"{share}{loss.strip()}{self.left()}"

    def title(self, width: int) -> str:
        share = f" · {100 * self.step // self.steps} %" if self.steps else ""
        far = f"step {self.step}/{self.steps}{share}{self.left()}"
        whole = " · ".join(part for part in (self.run, self.recipe, far) if part)
        titles = (f"── {whole} ──", f"── {self.run} · {far}", far)
        return next((title for title in titles if len(title) <= width), far)

    def left(self) -> str:
        left = self.step_s * (self.steps - self.step)
        return f" · ETA {int(left // 3600)}h {int(left % 3600 // 60):02d}m" if left > 0 else ""

    def numbers(self, width: int) -> list[str]:
        """Parts of the line with loss, held-out loss, learning rate and gradient norm."""
        parts, bars = [self.state], max(8, min(24, width // 3 - 4))
        if self.losses:
            parts.append(f"loss {self.losses[-1]:.3f} {sparkline(self.losses, bars)}")
        if self.evals:
            parts.append(f"eval {self.evals[-1]:.3f} {sparkline(self.evals, bars // 3)}")
        if self.lr is not None:
            parts.append(f"lr {self.lr:.1e}")
        if self.grad_norm is not None:
            parts.append(f"grad {self.grad_norm:.2f}")
        return parts

    def times(self) -> list[str]:
        """Parts of the line with a step's time by phase and the bytes that compression saves."""
        parts = []
        if self.step_s and self.compute_s:
            compute, wait = round(self.compute_s, 1), round(self.wait_s, 1)
            sync = max(0.0, round(self.step_s, 1) - compute - wait)  # a step may begin before its round
            split = f"compute {compute:.1f} + wait {wait:.1f} + sync {sync:.1f}"
            parts.append(f"step {compute + wait + sync:.1f} s = {split}")
        elif self.step_s:
            parts.append(f"step {self.step_s:.1f} s")
        if self.full > self.moved > 0:
            saved = f"{megabytes(self.full - self.moved)} saved, {self.full / self.moved:.0f}x below FP16"
            parts.append(f"{megabytes(self.moved)} exchanged, {saved}")
        if self.tokens:
            parts.append(f"{short(self.tokens)} tokens")
        return parts

    def underway(self, width: int) -> list[str]:
        event = self.progress
        if event is None or event.done >= event.total > 0 or time.monotonic() > self.progressed + STALE:
            return []
        return [progress_bar(event, width)]

    def table(self, width: int, most: int) -> list[str]:
        """Lay out a row for each peer; peers beyond TOP, or beyond the space, are only counted."""
        if not self.peers:
            return []
        columns = COLUMNS if width >= WIDE else NARROW if width >= WIDE_ENOUGH else SLIM
        now, names = time.monotonic(), sorted(self.peers)
        names.sort(key=lambda name: name != self.me)  # this machine first
        shown = names[: min(TOP, most)]
        marked = {name: f"{name} <" if name == self.me else name for name in shown}
        cells = [self.peers[name].cells(marked[name], now) for name in shown]
        spare = width - sum(FIXED.get(column, 0) + 1 for column in columns) - 1
        name = min(20, spare if columns is SLIM else spare // 2)
        widths = FIXED | {"PEER": name, "GPU": min(24, spare - name)}
        lines = [row_of(row, columns, widths) for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *cells]]
        return lines + ([f"and {len(names) - len(shown)} more"] if len(names) > len(shown) else [])

    def keys(self) -> str:
        if self.me:
            return "Ctrl-C: leave after this step · twice: leave now"
        if self.watched:
            return "Ctrl-C: look no more; the run goes on"
        return "Ctrl-C: end after this exchange · twice: at once"


def flowed(parts: list[str], width: int) -> list[str]:
    """Fill lines with as many parts as fit; a part too long for a line takes several."""
    lines: list[str] = []
    for part in (piece for whole in parts for piece in textwrap.wrap(whole, width)):
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(part)
    return lines


def row_of(cells: Mapping[str, str], columns: tuple[str, ...], widths: Mapping[str, int]) -> str:
    return " ".join(
        f"{cells[c][: widths[c]]:<{widths[c]}}" if c in WORDS else f"{cells[c]:>{widths[c]}}" for c in columns
    ).rstrip()
