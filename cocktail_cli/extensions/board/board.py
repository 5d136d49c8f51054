"""The board of a run: a state that events and hub answers change, and how rich draws it.

Only this module and live_view.py import rich.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from cocktail_cli.foreign_text import readable
from cocktail_cli.ui import (
    LEAST_ROWS,
    MARK,
    counted,
    events,
    megabytes,
    progress_text,
    sentence,
    short,
    step_numbers,
    text_chart,
    time_left_text,
)

OF_LATE = 20  # answers of the hub over which rates are averaged, a minute or less
GONE = ("left", "lost", "removed")
WAITING, UNANSWERED = "waiting for peers", "waiting for the hub to answer"  # states of a run
AWAY = ("deciding", *GONE)  # states of people who are not in the run
# how that begins which this machine says as it ends -> what Ctrl-C does then
ENDING = {"pausing": "end the run with its model"} | dict.fromkeys(
    ("ending", "leaving", "writing"), "at once"
)
STALE = 5.0  # seconds after which progress without news is dropped
POINTS = 4096  # of the loss curve in memory; neighbours are averaged beyond
COLUMNS = ("PEER", "GPU", "STATE", "TOK/S", "UP/S", "DOWN/S", "RTT", "SHARE", "LAST")
NEEDS = {"GPU": 56, "UP/S": 56, "DOWN/S": 79, "RTT": 79, "LAST": 79}  # columns of a terminal that shows them
# columns of words: those of a greatest width are cut where a row is too long
WORDS: dict[str, Any] = {"PEER": {"max_width": 20}, "GPU": {"max_width": 24}, "STATE": {"no_wrap": True}}
FIGURES: dict[str, Any] = {"justify": "right", "no_wrap": True}
NUMBERS = ("lr", "grad_norm", "step_s", "compute_s", "wait_s", "sync_s")
NEWS = (events.PeerDeciding, events.PeerDeclined, events.PeerJoined, events.PeerLeft)
# the 16 colours of the terminal, which its user has chosen -> words with which states begin
STATES = {
    "green": ("train", "running"),
    "yellow": ("deciding", "syncing", "waiting", "in line", "starting", "joined", "behind", "stopping"),
    "bold red": ("lost", "late", "failed"),
    "dim": ("done", "left", "removed", "finished", "stopped", "paused"),
}


def is_news(event: events.Event) -> bool:
    return isinstance(event, NEWS) or (isinstance(event, events.OfExtension) and event.news)


def cut(text: str, style: str = "") -> Text:
    """Make a text that is cut where it is too long for its line."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def state_of(state: str) -> Text:
    """Colour the word of a state."""
    return cut(state, next((style for style, words in STATES.items() if state.startswith(words)), ""))


def flowed(parts: Iterable[Text], console: Console, width: int) -> list[Text]:
    """Fill lines with as many parts as fit; a part too long for a line takes several."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 3 + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "   ", part)
        else:
            lines.append(part)
    return [row for line in lines for row in line.wrap(console, width)]


@dataclass
class PeerRow:
    """A peer's line in the table."""

    hardware: str = ""
    state: str = "syncing"
    share: float | None = None  # share of the trained tokens
    rtt: float | None = None  # ms
    seen: float = 0.0  # monotonic seconds; 0: never
    # (monotonic seconds, tokens, bytes up, bytes down), sums since it joined
    sums: deque[tuple[float, float, float, float]] = field(default_factory=lambda: deque(maxlen=OF_LATE))

    def add(self, now: float, tokens: float, up: float, down: float) -> None:
        earlier = self.sums[-1][1:] if self.sums else ()
        again = any(new < old for new, old in zip((tokens, up, down), earlier, strict=False))
        if again or (tokens and earlier and not earlier[0]):
            self.sums.clear()  # it has joined again, the hub was restarted, or it trains from now on
        self.sums.append((now, tokens, up, down))

    def rates(self) -> tuple[float, ...] | None:
        """Compute tokens, bytes up and bytes down per second of late; None before two samples."""
        if len(self.sums) < 2 or (span := self.sums[-1][0] - self.sums[0][0]) <= 0:
            return None
        first, last = self.sums[0], self.sums[-1]
        return tuple((b - a) / span for a, b in zip(first[1:], last[1:], strict=True))

    def cells(self, name: str, now: float) -> dict[str, Text]:
        rates = self.rates()
        tokens, up, down = ["-"] * 3 if rates is None else map(short, rates)
        last = "-" if not self.seen else f"{max(0.0, now - self.seen):.0f} s"
        rtt = "-" if self.rtt is None else f"{self.rtt:.0f} ms"
        share = "-" if self.share is None else f"{100 * self.share:.0f}%"
        values = (name, self.hardware, "", tokens, up, down, rtt, share, last)
        return dict(zip(COLUMNS, map(cut, values), strict=True)) | {"STATE": state_of(self.state)}


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
    samples: int = 0
    tokens_per_s: float = 0.0  # of late, as the hub says; 0: unknown
    losses: list[tuple[float, float]] = field(default_factory=list)  # (step, loss), by step
    evals: dict[int, float] = field(default_factory=dict)  # step -> held-out loss
    numbers: dict[str, Any] = field(default_factory=dict)  # of step_numbers, the newest of each
    ends: float = 0.0  # monotonic time by the hub's newest estimate; 0: unknown
    moved: float = 0.0  # bytes exchanged so far, both ways, all members; downloads of joiners excluded
    carried: float = 0.0  # of these in rounds whose packets moved something
    full: float = 0.0  # bytes that FP16 would have taken in these
    over: bool = False  # nothing more will come: there are no keys to press
    doing: str = ""  # what this machine does beside rounds, as it said last
    state: str = "starting"
    progress: events.Progressed | None = None
    progressed: float = 0.0  # time of the last Progressed
    peers: dict[str, PeerRow] = field(default_factory=dict)
    said: deque[str] = field(default_factory=lambda: deque(maxlen=3))

    def take(self, event: events.Event) -> None:
        """Apply one event."""
        if is_news(event):
            self.said.append(f"{time.strftime('%H:%M:%S')} {' '.join((sentence(event) or '').split())}")
        match event:
            case events.RunStarted():
                self.run, self.recipe, self.steps, self.me = event.run, event.recipe, event.steps, ""
                self.state, self.doing = WAITING, ""
            case events.Joined():
                self.run, self.recipe, self.me, self.state = event.run, event.recipe, event.peer, "joined"
            case events.PeerDeciding():
                self.peers[event.peer] = PeerRow(event.hardware, "deciding")
            case events.PeerDeclined():
                self.peers.pop(event.peer, None)
            case events.PeerJoined():
                self.peers[event.peer] = PeerRow(event.hardware)
            case events.PeerReady():
                self.peers.setdefault(event.peer, PeerRow()).state = "waiting"
            case events.PeerLeft():
                self.peers.setdefault(event.peer, PeerRow()).state = event.how
            case events.Step():
                self.count(event)
            case events.Eval():
                self.evals[event.step] = event.loss
            case events.Progressed():
                measured = event.total > 0 or event.rate > 0
                self.progress, self.progressed = (event if measured else None), time.monotonic()
                self.state = self.state if measured and self.losses else event.state
                self.doing = self.doing if measured else event.state
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

    def end_rows(self) -> None:
        """Mark all peers that are present as done: the run is over."""
        for row in self.peers.values():
            row.state = row.state if row.state in AWAY else "done"

    def count(self, event: events.Step) -> None:
        self.doing = self.doing if self.doing.startswith((*ENDING,)) else ""
        self.step, self.steps, self.state = event.step, event.steps, self.doing or "training"
        self.numbers |= {key: value for key, value in step_numbers(event).items() if value is not None}
        if not self.me:  # a peer's steps count its own tokens only; the hub reports the sum
            self.tokens, self.samples = event.tokens or self.tokens, event.samples or self.samples
        if event.loss is not None:
            self.losses.append((event.step, event.loss))
        if len(self.losses) > POINTS:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            self.losses = [((a + b) / 2, (y + z) / 2) for (a, y), (b, z) in pairs]
        up, down, fetched = event.up_bytes, event.down_bytes, event.fetched_bytes
        members = event.ratio_up.keys() | event.ratio_down.keys()
        moved = sum(up.get(peer, 0) + down.get(peer, 0) - fetched.get(peer, 0) for peer in members)
        self.moved, self.full = self.moved + moved, self.full + event.ratio_fp16 * moved
        self.carried += moved if event.ratio_fp16 else 0
        now = time.monotonic()
        for name in members:  # not those that are still joining, whose bytes are counted too
            row = self.peers.setdefault(name, PeerRow())
            row.state, row.seen = "training" if name in event.accepted else "late", now

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
        self.ends = now + left if (left := status.get("eta_s")) else 0.0
        earlier = status.get("losses", ())
        if self.losses and status.get("state") == "waiting":
            self.state = WAITING
        if self.watched:
            self.state, self.losses = status["state"], list(earlier)
            self.numbers["grad_norm"], self.samples = status.get("grad_norm"), status.get("samples", 0)
        elif self.losses and earlier and earlier[0][0] < self.losses[0][0]:  # resumed, or joined late
            self.losses = [point for point in earlier if point[0] < self.losses[0][0]] + self.losses
        if self.watched or not self.losses:  # a joiner before its first step
            self.step, self.steps = status.get("step", self.step), status.get("max_steps", self.steps)
        self.evals |= dict(status.get("eval_losses", ()))

    def miss(self) -> None:
        """Note that the hub did not answer; the last figures stay, with their age."""
        if not self.over:
            self.state, self.ends = self.doing or UNANSWERED, 0.0
        if (me := self.peers.get(self.me)) is not None:
            me.state = "waiting"

    # ---- out -----------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw figures, loss curve, peers and news in fewer lines than the console has.

        The curve takes what the others leave; the last rows are left to messages above the board.
        """
        if not self.run:
            yield from self.underway()
            return
        width, room = options.max_width, max(1, console.height - 1 - console.height // 10)
        foot = [] if self.over else flowed([Text(self.keys(), "dim")], console, width)
        head = [self.title(), *self.underway(), *flowed(self.figures(), console, width)]
        head = head[: max(1, room - len(foot))]
        spare = room - len(head) - len(foot)
        wanted = len(self.peers) + 1 if self.peers else 0
        least = min(wanted, 4)
        news = list(self.said)[::-1][: max(0, spare - least - LEAST_ROWS)][::-1]
        spare -= len(news)
        rows = max(spare - wanted, min(spare - least, max(spare // 2, LEAST_ROWS)))
        chart = text_chart(self.losses, sorted(self.evals.items()), width, rows)
        yield from head
        for line in chart:
            text = cut(line, "dim")
            text.highlight_regex("[\u2801-\u28ff]+", "not dim cyan")
            text.highlight_regex(MARK, "not dim magenta")
            yield text
        yield from self.table(width, spare - len(chart))
        yield from (cut(said, "dim") for said in news)
        yield from foot[: room - len(head)]

    def title(self) -> Rule:
        share = f" · {100 * self.step // self.steps} %" if self.steps else ""
        left = self.ends - time.monotonic()
        eta = f"ETA {time_left_text(left)}" if left > 0 and self.step < self.steps else ""
        parts = (f"step {self.step}/{self.steps}{share}", eta, self.run, self.recipe)
        return Rule(Text(" · ".join(filter(None, parts)), "bold"), align="left", style="dim")

    def figures(self) -> list[Text]:
        """Tell state, losses, learning rate, gradient norm, speed, sums, the time of a step by phase, and the
        bytes that compression saves: parts of lines."""
        evals = ""
        if self.evals:
            newest, best = max(self.evals), min(self.evals, key=lambda step: (self.evals[step], step))
            where = "now" if best == newest else f"{self.evals[best]:.3f} at step {best}"
            evals = f"[magenta]{MARK}[/] eval [magenta]{self.evals[newest]:.3f}[/]"
            evals += f" (best {where})" if len(self.evals) > 1 else ""
        lr, grad, step, compute, wait, sync = map(self.numbers.get, NUMBERS)
        wait = wait or 0.0
        split = f" = compute {compute:.1f} + wait {wait:.1f} + sync {sync:.1f}" if compute else ""
        whole = max(step or 0.0, (compute or 0.0) + wait)  # a step may begin before its round
        ratio = self.full / (self.carried or 1.0)
        saved = f"{megabytes(self.full - self.carried)} saved, {ratio:.0f}x below FP16"
        said = [
            f"loss [cyan]{self.losses[-1][1]:.3f}[/]" if self.losses else "",
            evals,
            "" if lr is None else f"lr {lr:.1e}",
            "" if grad is None else f"grad {grad:.2f}",
            f"{short(self.tokens_per_s)} tok/s" if self.tokens_per_s else "",
            f"{short(self.tokens)} tokens" if self.tokens else "",
            counted(self.samples, "sample") if self.samples else "",
            f"step {whole:.1f} s{split}" if step else "",
            f"{megabytes(self.moved)} exchanged, {saved}" if ratio > 1 else "",
        ]
        return [state_of(self.state), *(Text.from_markup(one) for one in said if one)]

    def underway(self) -> Iterable[RenderableType]:
        """Draw one line: `fetching the base  ━━━━━━━━─────  3.1 MB of 12.1 GB, 61 MB/s, 3 min left`."""
        event = self.progress
        if event is None or event.done >= event.total > 0 or time.monotonic() > self.progressed + STALE:
            return
        bar = ProgressBar(event.total, event.done) if event.total else ""
        line = Table.grid(Column(no_wrap=True), Column(max_width=40), Column(no_wrap=True), padding=(0, 1))
        line.add_row(cut(event.state), bar, cut(progress_text(event)))
        yield line

    def table(self, width: int, most: int) -> Iterable[RenderableType]:
        """Lay out a row for each peer in at most `most` lines; peers beyond these are only counted."""
        if not self.peers or most < 2:
            return
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        columns = [column for column in COLUMNS if NEEDS.get(column, 0) <= width]
        for column in columns:
            table.add_column(column, **WORDS.get(column, FIGURES))
        now, names = time.monotonic(), sorted(self.peers)
        names.sort(key=lambda name: (name != self.me, self.peers[name].state in GONE))  # this machine first
        shown = names if len(names) < most else names[: most - 2]
        for one in shown:
            cells = self.peers[one].cells(f"{one} <" if one == self.me else one, now)
            table.add_row(*(cells[column] for column in columns))
        yield table
        if more := len(names) - len(shown):
            yield f"and {more} more"

    def keys(self) -> str:
        if ends := [does for word, does in ENDING.items() if self.doing.startswith(word)]:
            return f"Ctrl-C: {ends[0]}"
        if self.me:
            return "Ctrl-C: leave after the exchange in flight · twice: leave now"
        if self.watched:
            return "Ctrl-C: look no more; the run goes on"
        return "Ctrl-C: pause · twice: end the run with its model"
