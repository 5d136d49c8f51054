"""A run's output folder: what lies where, who may write there, and the records that are kept beside the
model.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from cocktail_cli.errors import Failure
from cocktail_cli.machine import RunRecord, read
from cocktail_cli.ui import FOLDER as TRACKING
from cocktail_cli.ui import (
    Event,
    Line,
    Metrics,
    PageOpened,
    RunStarted,
    Step,
    Tracker,
    as_json,
    missing_lines,
    read_written,
    sentence,
    step_line,
)

LOG = "cocktail.log"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
RECIPE = "recipe.yaml"
RESOLVED = "recipe.json"  # the text whose sha256 is the recipe's hash
BASE = "base"
TOKENIZER = "tokenizer"  # with the chat template that the data was put through
LEDGER = "ledger"
STREAM = "stream.jsonl"  # how far data that are read as they are needed have been read
SNAPSHOTS = "snapshots"
OURS = {LOG, EVENTS, METRICS, TRACKING, RECIPE, RESOLVED, BASE, TOKENIZER, LEDGER, STREAM, SNAPSHOTS, "peers"}
TOLD = "cocktail_cli.told"  # the logger of what users are told: on the terminal they see it already
ROOMS = ("cocktail_cli", "transport", "recipes", "compress")


def claim(folder: Path, recipe_hash: str) -> None:
    """Make the folder; refuse one that holds a run, or anything that is not from a launch that failed early.

    Raises:
        Failure: output_in_use.
    """
    other = ("choose another folder: -o DIR",)
    if folder.exists() and not folder.is_dir():
        raise Failure("output_in_use", f"{folder} is a file", hints=other)
    record = read(folder)
    check_left(folder, record)
    if record is not None:
        same, over = record.is_of(recipe_hash), record.state == "finished"
        anew = f"begin anew in {beside(folder).name}: the same command with --fresh"
        hints: tuple[str, ...] = (anew, *other, f"its model: cocktail export {record.run} -o DIR")
        if same and not over:
            hints = ("go on with it: the same command with --resume", *hints)
        raise Failure(
            "output_in_use",
            f"{folder} holds the {'finished' if over else 'unfinished'} run {record.run} of "
            f"{'this' if same else 'another'} recipe",
            hints=hints,
        )
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in OURS) if folder.is_dir() else []
    if strangers:
        raise Failure("output_in_use", f"{folder} is not empty ({', '.join(strangers[:3])})", hints=other)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / STREAM, *(folder / LEDGER).glob("*")):  # of a launch that ended before its run began
        old.unlink(missing_ok=True)


def beside(folder: Path) -> Path:
    """The folder; where a run is in it the first that does not exist of folder-2, folder-3 and so on."""
    if read(folder) is None:
        return folder
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(other for other in others if not other.exists())


def check_left(folder: Path, record: RunRecord | None) -> None:
    """Nobody writes the ledger in this output folder. Raises Failure (output_in_use)."""
    from transport.ledger import lock_exclusively
    from transport.protocol import LedgerBusy

    lock = folder / LEDGER / "ledger.lock"
    try:
        if lock.exists():
            lock_exclusively(lock).close()
    except LedgerBusy:
        if record is None:
            raise Failure("output_in_use", f"another launch is at work in {folder}") from None
        raise Failure(
            "output_in_use",
            f"the run {record.run} is going on: its hub (process {record.pid}) holds the ledger",
            hints=(f"cocktail status {record.run}", f"cocktail stop {record.run}"),
        ) from None


class Recorder:
    """Writes every event to events.jsonl, and the numbers of a curve to metrics.jsonl and to trackers.
    Secrets are left out.

    A run does not end because its diary cannot be written: `told` hears of it once, and the lines that did
    not fit are tried again with the next ones.

    Args:
        batch: samples of a step, by which steps are counted that a killed hub could not write down.
        trackers: are given the same numbers.
    """

    def __init__(
        self,
        folder: Path,
        told: Callable[[str], None] = lambda _: None,
        batch: int = 1,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.folder, self.batch, self.trackers = folder, batch, trackers
        self.events = appended(folder / EVENTS)
        self.known = read_written(folder / METRICS)
        self.file = appended(folder / METRICS)
        self.metrics = Metrics()
        self.told = told
        self.failing = False

    def show(self, event: Event) -> None:
        try:
            self.write(event)
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.failing = True
                self.told(f"{EVENTS} cannot be written: {error.strerror}; the run goes on")

    def write(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            head, _, place = event.url.partition("@")
            event = dataclasses.replace(event, url=f"{head.partition('.')[0]}.***@{place}")
        if isinstance(event, PageOpened):
            event = PageOpened(event.url.partition("#")[0])
        if said := sentence(event) or (step_line(event, 0) if isinstance(event, Step) else ""):
            logging.getLogger(TOLD).info("%s", said)
        self.events.write(as_json(event) + "\n")
        self.events.flush()
        if isinstance(event, RunStarted):
            for tracker in self.trackers:
                tracker.start(event)
            if event.round:
                self.note(missing_lines(self.folder / LEDGER, self.known, self.batch, event.steps))
        self.note(self.metrics.lines(event))

    def note(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.file.write(json.dumps(line) + "\n")
            for tracker in self.trackers:
                tracker.log(line)
        self.file.flush()

    def close(self) -> None:
        for file in (self.events, self.file):
            with suppress(OSError):  # told already
                file.close()
        for tracker in self.trackers:
            tracker.close()


def appended(path: Path) -> TextIO:
    """The file, to write more lines; a last one that was cut short (a launch that was killed) is ended."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def log_to(path: Path | None, verbose: int) -> None:
    """Developers' words of our rooms: to the run's log, and with -v to stderr as well."""
    level = logging.DEBUG if verbose > 1 else logging.INFO
    logging.raiseExceptions = False  # a log on a full disk is no reason for tracebacks on the terminal
    targets: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")] if path else []
    if verbose:
        stderr = logging.StreamHandler(Stderr())
        # tracebacks are the command's to print
        stderr.addFilter(lambda record: not record.exc_info and record.name != TOLD)
        targets.append(stderr)
    for handler in targets:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for room in ROOMS:
        logger = logging.getLogger(room)
        logger.setLevel(level)
        logger.handlers = targets or [logging.NullHandler()]
        logger.propagate = False
    # It tells at its import, which is peft's, which of its kernels this machine lacks: nobody asked for them.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class Stderr:
    """sys.stderr as it is when it is written to: a live view puts another there."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
