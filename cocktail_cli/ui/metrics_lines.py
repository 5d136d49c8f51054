"""Metrics of a run as flat lines, for metrics.jsonl in its folder and for views that report numbers.

    {"v":1,"t":"2026-11-20T14:02:40Z","kind":"step","step":131,"round":131,"loss":1.842,...}  a round
    {"v":1,"t":...,"kind":"eval","step":130,"round":130,"eval_loss":1.901,"tokens":40960}
    {"v":1,"t":...,"kind":"peer","step":131,"round":131,"peer":"attic-3090","did":"joined",...}  ready, left

Each committed round appears exactly once: lines that a killed hub could not write are filled in from the
ledger, as far as it knows them. Within version 1 fields are only added.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from .events import (
    Eval,
    Event,
    OfExtension,
    PeerJoined,
    PeerLeft,
    PeerReady,
    RunStarted,
    Step,
    figures_of,
    name_of,
    timestamp,
)

if TYPE_CHECKING:
    from transport.ledger import RoundRow

VERSION = 1
FP16 = 2  # bytes of a parameter
NOTHING = 10_000  # times smaller than the parameters in FP16: such a packet moves nothing

Line = dict[str, Any]
Named = Callable[[Sequence[float]], Mapping[str, Mapping[str, float]]]


class Metrics:
    """Convert events to lines; remembers the current step for the lines of peers.

    Args:
        ledger: of the run. Where it goes on, its start yields the lines that are not written yet.
        known: the newest rounds that are, as of read_written.
        batch: samples per step.
        named: names the objective's further figures.
    """

    def __init__(
        self,
        ledger: Path | None = None,
        known: tuple[int, int] = (-1, -1),
        batch: int = 1,
        named: Named = lambda figures: {},
    ) -> None:
        self.ledger, self.known, self.batch, self.named = ledger, known, batch, named
        self.step = self.round = 0

    def lines(self, event: Event) -> Iterator[Line]:
        if isinstance(event, RunStarted) and event.round and self.ledger is not None:
            yield from self.missing(self.ledger, event.steps)
        elif isinstance(event, Step):
            self.step, self.round = event.step, event.round
            yield line("step", **step_numbers(event))
        elif isinstance(event, Eval):
            numbers: Line = {"eval_loss": event.loss, "tokens": event.tokens} | held_out(event.extra)
            yield line("eval", step=event.step, round=event.round, **numbers)
        elif isinstance(event, OfExtension) and (fields := event.measured()):
            yield line(name_of(type(event)), **fields)
        elif isinstance(event, PeerJoined):
            yield self.peer(event.peer, "joined", hardware=event.hardware)
        elif isinstance(event, PeerReady):
            yield self.peer(event.peer, "ready", joining_s=event.joining_s)
        elif isinstance(event, PeerLeft):
            yield self.peer(event.peer, "left", reason=event.reason)

    def missing(self, ledger: Path, steps: int) -> Iterator[Line]:
        """Yield the lines that are not written and the ledger has, in order; `steps` of the run."""
        from transport import Ledger

        with Ledger(ledger, write=False) as opened:
            evaluated = {row.round: row for row in opened.evaluations() if row.round > self.known[1]}
            counted = tokens = 0
            for row in opened.rounds():
                if found := evaluated.get(row.round):
                    about: Line = {"eval_loss": found.loss, "tokens": found.tokens}
                    about |= held_out(self.named(found.figures))
                    yield line("eval", step=found.step, round=found.round, **about)
                counted, tokens = counted + row.counted, tokens + row.tokens
                if row.round > self.known[0]:
                    yield line_of_round(row, min(steps, counted // self.batch), tokens)

    def peer(self, name: str, did: str, **more: Any) -> Line:
        return line("peer", step=self.step, round=self.round, peer=name, did=did, **more)


class Baseline:
    """Counts what the trained parameters would take in FP16 in the place of a run's packets.

    A packet counts up with its round, down with the next one, in which all fetch it; one that moves nothing,
    such as those of the first rounds, does not count.
    """

    def __init__(self, parameters: int) -> None:
        self.whole, self.down = FP16 * parameters, -1

    def add(self, packet: int, times: int) -> int:
        """Return the bytes for a round whose packet has so many; `times`: members x steps."""
        up = times * self.whole * (packet * NOTHING > self.whole)
        both = up + (up if self.down < 0 else self.down)  # of the rounds before a restart nothing is known
        self.down = up
        return both


def line(kind: str, when: datetime | None = None, **fields: Any) -> Line:
    return {"v": VERSION, "t": timestamp(when), "kind": kind, **fields}


def step_numbers(event: Step) -> Line:
    """Summarize a round in plottable numbers: sums and medians over its peers."""
    compute, wait = median_or_none(event.compute_s.values()), median_or_none(event.wait_s.values())
    sync = None if compute is None else round(max(0.0, event.step_s - compute - (wait or 0.0)), 3)
    tokens = sum(event.tokens_by_peer.values())
    return {
        "step": event.step,
        "round": event.round,
        "loss": event.loss,
        "tokens": event.tokens,
        "tokens_per_s": round(tokens / (event.step_s * event.local_steps), 1) if event.step_s else None,
        "peers": event.peers,
        "late": event.peers - len(event.accepted),
        "samples": event.samples or None,
        "lr": event.lr,
        "grad_norm": event.grad_norm,
        "step_s": event.step_s,
        "compute_s": compute,
        "wait_s": wait,
        "sync_s": sync,
        "up_bytes": sum(event.up_bytes.values()),
        "down_bytes": sum(event.down_bytes.values()),
        "ratio_fp16": event.ratio_fp16 or None,
        "packet_bytes": event.packet_bytes,
        **figures_of(event.extra),
    }


def held_out(extra: Mapping[str, Any]) -> Line:
    return {f"eval_{name}": value for name, value in figures_of(extra).items()}


def median_or_none(values: Iterable[float]) -> float | None:
    there = list(values)
    return round(median(there), 3) if there else None


def line_of_round(row: RoundRow, step: int, tokens: int) -> Line:
    """Build the line of a round from the ledger's row, for a round whose event was never written."""
    unknown = dict.fromkeys(step_numbers(Step(0, 0, 0, None, 0)))
    known = {"step": step, "round": row.round, "loss": row.loss, "tokens": tokens, "peers": len(row.members)}
    late, when = len(row.members) - len(row.accepted), datetime.fromtimestamp(row.committed, UTC)
    return line("step", when, **(unknown | known | {"late": late, "packet_bytes": row.length}))


def read_written(path: Path) -> tuple[int, int]:
    """Read the newest round in a file, and the newest one whose model was evaluated; -1: none.

    An unfinished last line of a killed process is cut off. A damaged line counts for nothing: the file is
    for people.
    """
    if not path.exists():
        return -1, -1
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    newest, last = -1, -1
    for text in data[:whole].splitlines():
        with suppress(ValueError, TypeError, LookupError, AttributeError):
            each = json.loads(text)
            step = each["round"] if "loss" in each else -1
            evaluated = each["round"] if "eval_loss" in each else -1
            newest, last = max(newest, step), max(last, evaluated)
    return newest, last
