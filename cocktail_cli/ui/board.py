"""The screen of a run as lines of text, computed from events. This module knows no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from cocktail_cli.foreign_text import one_line, readable

from . import events
from .styled_line import Line, columns_of, flowed, padded
from .text_chart import LEAST_ROWS, UNICODE, Glyphs, text_chart

BARS = "▁▂▃▄▅▆▇█"
WIDE = 79  # columns that the full table needs
OF_LATE = 60.0  # seconds over which rates are averaged
GONE = ("left", "lost", "removed")
WAITING, UNANSWERED = "waiting for peers", "waiting for the hub to answer"  # states of a run
AWAY = ("deciding", *GONE)  # states of people who are not in the run
STALE = 5.0  # seconds after which progress without news is dropped
POINTS = 4096  # of the loss curve in memory; neighbours are averaged beyond
SMALL = 4  # terminals with fewer lines get one line
SAMPLE = 160  # characters of the model's own words
COLUMNS = ("PEER", "GPU", "STATE", "TOK/S", "UP/S", "DOWN/S", "RTT", "SHARE", "LAST")
NARROW = ("PEER", "GPU", "STATE", "TOK/S", "UP/S", "SHARE")
SLIM = ("PEER", "STATE", "TOK/S", "SHARE")  # for the narrowest terminals
WIDE_ENOUGH = 56  # columns that NARROW needs
WORDS = ("PEER", "GPU", "STATE")  # left-aligned columns
FIXED = {"STATE": 8, "TOK/S": 6, "UP/S": 6, "DOWN/S": 6, "RTT": 6, "SHARE": 5, "LAST": 5}
# styles of the states' words, by how they begin
STATES = {
    "good": ("train", "running"),
    "busy": ("deciding", "syncing", "waiting", "in line", "starting", "joined", "behind", "stopping"),
    "bad": ("lost", "late", "failed"),
    "dim": ("done", "left", "removed", "finished", "stopped", "paused"),
}


def state_style(state: str) -> str:
    """Choose the style of a state's word; "" for one that is not known."""
    return next((style for style, words in STATES.items() if state.startswith(words)), "")


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


def time_left_text(seconds: float) -> str:
    """Format the time left, to the second below an hour: `34 s`, `12 min 05 s`, `3 h 20 min`."""
    minutes, left = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{left} s"
    return f"{minutes} min {left:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def departed(how: str, reason: str) -> str:
    """Say how a peer went, once: `left: preempted`, `is lost: silent for 30 s`."""
    why = reason.removeprefix("left: ")
    why = "" if why in ("left on request", "asked to leave") else why
    return {"lost": "is lost", "removed": "was removed"}.get(how, "left") + (f": {why}" if why else "")


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
        earlier = self.sums[-1][1:] if self.sums else ()
        if any(new < old for new, old in zip((tokens, up, down), earlier, strict=False)):
            self.sums.clear()  # it has joined again, or the hub was restarted: the sums begin at zero
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
    glyphs: Glyphs = UNICODE  # characters of the chart
    step: int = 0
    steps: int = 0
    tokens: int = 0
    samples: int = 0
    tokens_per_s: float = 0.0  # over the whole run, as its hub says; 0: unknown
    losses: list[tuple[float, float]] = field(default_factory=list)  # (step, loss), by step
    evals: dict[int, float] = field(default_factory=dict)  # step -> held-out loss
    step_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    # (seconds left, monotonic time of that estimate): the hub's, or by the run's steps before it is asked
    eta: tuple[float, float] | None = None
    asked: bool = False  # the hub has answered
    lr: float | None = None
    grad_norm: float | None = None
    moved: float = 0.0  # bytes exchanged so far, both ways, all members; downloads of joiners excluded
    full: float = 0.0  # bytes that FP16 would have taken
    over: bool = False  # nothing more will come: there are no keys to press
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
                self.state = WAITING
            case events.Joined():
                self.run, self.recipe, self.me, self.state = event.run, event.recipe, event.peer, "joined"
            case events.PeerDeciding():
                self.peers[event.peer] = PeerRow(event.hardware, "deciding")
                self.note(f"{event.peer} is deciding whether to join")
            case events.PeerDeclined():
                self.peers.pop(event.peer, None)
                self.note(f"{event.peer} did not join")
            case events.PeerJoined():
                self.peers[event.peer] = PeerRow(event.hardware)
                self.note(f"{event.peer} joined")
            case events.PeerReady():
                self.peers.setdefault(event.peer, PeerRow()).state = "waiting"
            case events.PeerLeft():
                self.peers.setdefault(event.peer, PeerRow()).state = event.how
                self.note(f"{event.peer} {departed(event.how, event.reason)}")
            case events.Step():
                self.count(event)
            case events.Culprit():
                self.note(f"{event.peer} is slow: {event.cause}, {event.evidence}")
            case events.Eval():
                self.evals[event.step] = event.loss
            case events.Sample():
                words = " ".join(f"{event.prompt} > {event.text}".split())
                self.note(f"step {event.step}: {one_line(words, SAMPLE)}")
            case events.Progressed():
                measured = event.total > 0 or event.rate > 0
                self.progress, self.progressed = (event if measured else None), time.monotonic()
                self.state = self.state if measured and self.losses else event.state
            case events.RunFinished() | events.RunPaused():
                self.state = event.reason
                self.end_rows()
            case events.Left():
                self.state = event.reason
                if event.finished:
                    self.step = self.steps
                    self.end_rows()
                elif self.me in self.peers:
                    self.peers[self.me].state = "left"

    def note(self, what: str) -> None:
        self.said.append(f"{time.strftime('%H:%M:%S')} {what}")

    def end_rows(self) -> None:
        """Mark all peers that are present as done: the run is over."""
        for row in self.peers.values():
            row.state = row.state if row.state in AWAY else "done"

    def count(self, event: events.Step) -> None:
        self.step, self.steps, self.state = event.step, event.steps, "training"
        self.step_s = event.step_s or self.step_s
        if not self.me:  # a peer's steps count its own tokens only; the hub reports the sum
            self.tokens, self.samples = event.tokens or self.tokens, event.samples or self.samples
        self.compute_s = median(event.compute_s.values()) if event.compute_s else self.compute_s
        self.wait_s = median(event.wait_s.values()) if event.wait_s else self.wait_s
        self.lr, self.grad_norm = event.lr, event.grad_norm
        if event.loss is not None:
            self.losses.append((event.step, event.loss))
        if len(self.losses) > POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            self.losses = [((a + b) / 2, (y + z) / 2) for (a, y), (b, z) in pairs]
        up, down, fetched = event.up_bytes, event.down_bytes, event.fetched_bytes
        members = event.ratio_up.keys() | event.ratio_down.keys()
        moved = sum(up.get(peer, 0) + down.get(peer, 0) - fetched.get(peer, 0) for peer in members)
        self.moved, self.full = self.moved + moved, self.full + event.ratio_fp16 * moved
        now = time.monotonic()
        for name in members:  # not those that are still joining, whose bytes are counted too
            row = self.peers.setdefault(name, PeerRow())
            row.state, row.seen = "training" if name in event.accepted else "late", now
        if not self.asked:
            self.eta = None if event.eta_s is None else (event.eta_s, now)

    def look(self, status: Mapping[str, Any]) -> None:
        """Apply a hub's answer to `cocktail status`: the peers as they are now, with their sums."""
        status = readable(status)
        people = [*status.get("others", ()), *status["peers"]]  # of one name, the one that is present
        now, there = time.monotonic(), {peer["name"]: peer for peer in people}
        for name in self.peers.keys() - there.keys():
            del self.peers[name]
        for name, peer in there.items():
            row = self.peers.setdefault(name, PeerRow())
            row.hardware, row.state = peer["gpu"], peer["state"]
            if name == self.me and row.state == "lost":
                row.state = "waiting"  # it is here: a hub that was started again has not heard of it yet
            if row.state == "deciding":  # without a session there are no figures
                continue
            row.share, row.rtt, row.seen = peer["share"], peer["rtt_ms"], now - peer["last_seen_s"]
            row.add(now, peer.get("tokens", 0), peer["up_bytes"], peer["down_bytes"])
        self.tokens = status.get("tokens") or self.tokens
        self.tokens_per_s = status.get("tokens_per_s") or 0.0
        left, self.asked = status.get("eta_s"), True
        self.eta = None if left is None else (left, now)
        earlier = status.get("losses", ())
        if self.losses and status.get("state") == "waiting":
            self.state = WAITING
        if self.watched:
            self.state, self.losses = status["state"], list(earlier)
            self.grad_norm, self.samples = status.get("grad_norm"), status.get("samples", 0)
        elif self.losses and earlier and earlier[0][0] < self.losses[0][0]:  # resumed, or joined late
            self.losses = [point for point in earlier if point[0] < self.losses[0][0]] + self.losses
        if self.watched or not self.losses:  # a joiner before its first step
            self.step, self.steps = status.get("step", self.step), status.get("max_steps", self.steps)
        self.evals |= dict(status.get("eval_losses", ()))

    def miss(self) -> None:
        """Note that the hub did not answer; the last figures stay, with their age."""
        if not self.over:
            self.state, self.eta = UNANSWERED, None
        if (me := self.peers.get(self.me)) is not None:
            me.state = "waiting"

    # ---- out -----------------------------------------------------------------------------------------------

    def screen(self, width: int, height: int) -> list[Line]:
        """Lay the state out for a terminal of this size: figures, loss curve, peers, news.

        The curve takes what the others leave; the last rows are left to messages above the board. The caller
        cuts lines that are too long.
        """
        room = height - 1 - height // 10
        if room < SMALL:
            return [self.one_line(width)]
        foot = [] if self.over else flowed([Line.styled(self.keys(), "dim")], width)
        title, underway, figures = [self.title(width)], self.underway(width), self.figures()
        head = [*title, *flowed([*figures, *map(Line, self.times())], width), *underway]
        if len(head) + len(foot) > room:
            head = [*title, *flowed(figures, width), *underway][: max(1, room - len(foot))]
        spare = room - len(head) - len(foot)
        wanted = len(self.peers) + 1 if self.peers else 0
        least = min(wanted, 4)
        unused = max(0, spare - least - LEAST_ROWS)
        news = [Line.styled(said, "dim") for said in list(self.said)[::-1][:unused][::-1]]
        spare -= len(news)
        rows = max(spare - wanted, min(spare - least, max(spare // 2, LEAST_ROWS)))
        chart = text_chart(self.losses, sorted(self.evals.items()), width, rows, self.glyphs)
        if not chart and self.losses and spare > least:
            chart = [Line("loss ") + Line.styled(sparkline([y for _, y in self.losses], width - 5), "loss")]
        return [*head, *chart, *self.table(width, spare - len(chart)), *news, *foot]

    def one_line(self, width: int) -> Line:
        if line := self.underway(width):
            return line[0]
        share = f"step {self.step}/{self.steps} " if self.steps else ""
        loss = f"loss {self.losses[-1][1]:.3f}" if self.losses else ""
        left = f" · ETA {self.time_left()}" if self.time_left() else ""
        here = sum(row.state not in AWAY for row in self.peers.values())
        whole = f"{share}{self.state} {loss}".rstrip() + f"{left} · {counted(here, 'peer')}"
        lines = (whole, f"{share}{loss}{left}", f"{share}{loss}", share.strip() or self.state)
        return Line(first_that_fits(lines, width))

    def title(self, width: int) -> Line:
        share = f" · {100 * self.step // self.steps} %" if self.steps else ""
        step = f"step {self.step}/{self.steps}"
        far = f"{step}{share}" + (f" · ETA {self.time_left()}" if self.time_left() else "")
        whole = " · ".join(part for part in (self.run, self.recipe, far) if part)
        titles = (f"── {whole} ──", f"── {self.run} · {far}", far, f"{step}{share}", step)
        return Line.styled(first_that_fits(titles, width), "title")

    def time_left(self) -> str:
        """Format the time left in the run; "" where it is not known. A machine's own steps do not tell it."""
        if self.eta is None:
            return ""
        left = self.eta[0] - (time.monotonic() - self.eta[1])
        return time_left_text(left) if left > 0 and self.step < self.steps else ""

    def figures(self) -> list[Line]:
        """Parts of the lines with state, losses, learning rate, gradient norm, speed and sums."""
        parts = [Line.styled(self.state, state_style(self.state))]
        if self.losses:
            parts.append(Line("loss ") + Line.styled(f"{self.losses[-1][1]:.3f}", "loss"))
        if self.evals:
            newest, best = max(self.evals), min(self.evals, key=lambda step: (self.evals[step], step))
            shown = (
                Line.styled(self.glyphs.mark, "eval")
                + " eval "
                + Line.styled(f"{self.evals[newest]:.3f}", "eval")
            )
            where = "now" if best == newest else f"{self.evals[best]:.3f} at step {best}"
            parts.append(shown + (f" (best {where})" if len(self.evals) > 1 else ""))
        if self.lr is not None:
            parts.append(Line(f"lr {self.lr:.1e}"))
        if self.grad_norm is not None:
            parts.append(Line(f"grad {self.grad_norm:.2f}"))
        rates = [rates[0] for row in self.peers.values() if (rates := row.rates()) is not None]
        if speed := sum(rates) or self.tokens_per_s:
            parts.append(Line(f"{short(speed)} tok/s"))
        if self.tokens:
            parts.append(Line(f"{short(self.tokens)} tokens"))
        if self.samples:
            parts.append(Line(counted(self.samples, "sample")))
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
        return parts

    def underway(self, width: int) -> list[Line]:
        event = self.progress
        if event is None or event.done >= event.total > 0 or time.monotonic() > self.progressed + STALE:
            return []
        return [Line(progress_bar(event, width))]

    def table(self, width: int, most: int) -> list[Line]:
        """Lay out a row for each peer in at most `most` lines; peers beyond these are only counted."""
        if not self.peers or most < 1:
            return []
        if most < 3 and len(self.peers) >= most:
            return [Line(counted(len(self.peers), "peer"))]
        columns = COLUMNS if width >= WIDE else NARROW if width >= WIDE_ENOUGH else SLIM
        now, names = time.monotonic(), sorted(self.peers)
        names.sort(key=lambda name: (name != self.me, self.peers[name].state in GONE))  # this machine first
        shown = names if len(names) < most else names[: most - 2]
        spare = width - sum(FIXED.get(column, 0) + 1 for column in columns) - 1
        name = min(20, spare if columns is SLIM else spare // 2)
        widths = FIXED | {"PEER": name, "GPU": min(24, spare - name)}
        header = row_of(dict(zip(COLUMNS, COLUMNS, strict=True)), columns, widths)
        lines = [Line.styled(header.text, "dim")]
        for one in shown:
            marked = f"{one} <" if one == self.me else one
            lines.append(row_of(self.peers[one].cells(marked, now), columns, widths))
        more = len(names) - len(shown)
        return lines + ([Line(f"and {more} more")] if more else [])

    def keys(self) -> str:
        if self.me:
            return "Ctrl-C: leave after this step · twice: leave now"
        if self.watched:
            return "Ctrl-C: look no more; the run goes on"
        return "Ctrl-C: end after this exchange · twice: at once"


def first_that_fits(texts: Sequence[str], width: int) -> str:
    """Choose the first text of at most `width` columns, else the last one."""
    return next((text for text in texts if columns_of(text) <= width), texts[-1])


def row_of(cells: Mapping[str, str], columns: tuple[str, ...], widths: Mapping[str, int]) -> Line:
    """Format a row of the table; the word of its state has the style of that state."""
    row = Line()
    for number, column in enumerate(columns):
        text = padded(cells[column], widths[column], right=column not in WORDS)
        style = state_style(cells[column]) if column == "STATE" else ""
        row += (" " if number else "") + Line.styled(text, style)
    return row.rstrip()
