"""A run's output folder: the names in it, the right to write there, and the records beside the model.

Hashes of the files that a run began with and uses again are in the ledger's origin, under every head:

    file:recipe.yaml, file:tokenizer/<name>    in the run's folder
    file:base/<name>                           in the folder of the base model, wherever that is
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from cocktail_cli.assembly import recipe_type
from cocktail_cli.errors import Failure, damaged
from cocktail_cli.foreign_text import one_line, paragraphs
from cocktail_cli.machine import FILE, FORMAT, RunRecord, check_record, read_run
from cocktail_cli.ui import Metrics, counted, events, read_written, sentence, step_line

if TYPE_CHECKING:
    from recipes.config import Dataset, Recipe
    from recipes.models import BaseFile

LOG = "cocktail.log"
EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
RECIPE = "recipe.yaml"
RESOLVED = "recipe.json"  # the text whose sha256 is the recipe's hash
BASE = "base"
TOKENIZER = "tokenizer"  # with the chat template that the data was put through
LEDGER = "ledger"
DATA = "data"  # local data files, of a run that began on another machine
STREAM = "stream.jsonl"  # the position in streamed data
STREAM_BEFORE = STREAM + ".before"  # a damaged one
SNAPSHOTS = "snapshots"
OURS = {
    LOG,
    EVENTS,
    METRICS,
    RECIPE,
    RESOLVED,
    BASE,
    TOKENIZER,
    LEDGER,
    STREAM,
    STREAM_BEFORE,
    SNAPSHOTS,
    DATA,
    "peers",
}
TOLD = "cocktail_cli.told"  # logger of the user's messages, which the terminal shows already
ROOMS = ("cocktail_cli", "transport", "recipes", "compress")


class GrowingFile:
    """A text file that another process appends lines to."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0  # bytes that were read

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that are complete by now and were not yielded before."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # its rest is being written
                    return
                self._offset += len(line)
                yield line.decode(errors="replace").rstrip()


def claim(folder: Path, recipe_hash: str) -> None:
    """Make the folder of a new run. Raises as `check_unused`."""
    check_unused(folder, recipe_hash)
    folder.mkdir(parents=True, exist_ok=True)
    # of a launch that ended before its run began: it has no round
    (folder / STREAM).unlink(missing_ok=True)
    shutil.rmtree(folder / LEDGER, ignore_errors=True)


def check_unused(folder: Path, recipe_hash: str) -> None:
    """Raise Failure (output_in_use) where the folder holds a run, or files of other kinds; OSError where it
    cannot be made."""
    other = ("choose another folder: -o DIR",)
    if folder.exists() and not folder.is_dir():
        raise Failure("output_in_use", f"{folder} is a file", hints=other)
    record = read_run(folder)
    check_record(folder)
    check_unlocked(folder, record)
    if record is None and holds_packets(folder):
        back = f"put {FILE} back from a copy: it has the run's keys"
        text = f"{folder} holds the ledger of a run whose {FILE} is gone"
        raise Failure("output_in_use", text, hints=(back, *other))
    if record is not None:
        same, over = record.is_of(recipe_hash), record.over
        anew = f"begin anew in {unused_folder(folder).name}: the same command with --fresh"
        hints: tuple[str, ...] = (anew, *other, f"its model: cocktail export {record.run} -o DIR")
        if same and not over:
            hints = (f"go on with it: cocktail resume {record.run}", *hints)
        raise Failure(
            "output_in_use",
            f"{folder} holds the {'finished' if over else 'unfinished'} run {record.run} of "
            f"{'this' if same else 'another'} recipe",
            hints=hints,
        )
    strangers = sorted(p.name for p in folder.iterdir() if p.name not in OURS) if folder.is_dir() else []
    if strangers:
        raise Failure("output_in_use", f"{folder} is not empty ({', '.join(strangers[:3])})", hints=other)
    near = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=near).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def holds_packets(folder: Path) -> bool:
    """Tell whether an output folder has the packets of committed rounds."""
    from transport.ledger import PACKETS

    packets = folder / LEDGER / PACKETS
    return packets.is_file() and packets.stat().st_size > 0


def unused_folder(folder: Path) -> Path:
    """Return the folder; if a run is in it, the first of folder-2, folder-3, ... that does not exist."""
    if not (folder / FILE).exists() and not holds_packets(folder):
        return folder
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(other for other in others if not other.exists())


def is_locked(folder: Path) -> bool:
    """Tell whether a process holds the ledger in this output folder."""
    from transport.ledger import is_locked

    return is_locked(folder / LEDGER)


def raise_lacking(folder: Path, changes: int) -> NoReturn:
    """Raise Failure (altered): the tables of a ledger lack so many of the newest changes of its journal."""
    from transport.ledger import DATABASE, JOURNAL

    lacks = f"it lacks the newest {counted(changes, 'change')} of {JOURNAL}"
    raise damaged(folder / LEDGER / DATABASE, lacks, "cocktail resume carries them out")


def check_unlocked(folder: Path, record: RunRecord | None) -> None:
    """Raise Failure (output_in_use) where a process holds the ledger in this output folder."""
    if not is_locked(folder):
        return
    if record is None:
        hints = ("wait until it has ended, or choose another folder: -o DIR",)
        raise Failure("output_in_use", f"another launch is at work in {folder}", hints=hints)
    raise Failure(
        "output_in_use",
        f"the run {record.run} is going on: its hub (process {record.pid}) holds the ledger",
        hints=(f"cocktail status {record.run}", f"cocktail stop {record.run}"),
    )


def recipe_in(folder: Path, expected: str = "") -> Recipe:
    """Load the recipe of the run in a folder, whose revisions are pinned to commits.

    Args:
        expected: its hash. Another text is damaged, and Failure (altered) says so.
    """
    from recipes.config import recipe_from_json
    from recipes.errors import RecipeError

    path = folder / RESOLVED
    fault = "it is gone"
    try:
        text = path.read_bytes()
        if not expected or hashlib.sha256(text).hexdigest() == expected:
            record = read_run(folder)
            former = record is not None and record.format != FORMAT
            return recipe_from_json(text.decode(), recipe_type, former)
        fault = f"its sha256 is not {expected}, the hash of the run's recipe"
    except (FileNotFoundError, ValueError, RecipeError) as error:
        fault = fault if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
    back = f"put {RESOLVED} back from a copy, or make it anew from {RECIPE}: cocktail resume does so"
    raise damaged(path, fault, back)


def mend_recipe(folder: Path, expected: str) -> str:
    """Write recipe.json anew from recipe.yaml, where it is not the text with this hash and that leads to it.
    Returns a sentence about it, or ""."""
    import yaml

    from recipes.config import recipe_from_json
    from recipes.errors import RecipeError

    path = folder / RESOLVED
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == expected:
        return ""
    try:
        values = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
        text = recipe_from_json(json.dumps(values), recipe_type).to_json()
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecipeError):
        return ""
    if hashlib.sha256(text.encode()).hexdigest() != expected:
        return ""
    path.write_text(text, encoding="utf-8")
    return f"{path} was damaged or gone: it was made anew from {RECIPE}"


def as_yaml(recipe_json: str) -> str:
    """Format a resolved recipe as YAML, with keys in the order of the schema."""
    import yaml

    from recipes.config import recipe_from_json

    keys = recipe_from_json(recipe_json, recipe_type).model_dump(mode="json")
    return str(yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=100))


class Recorder:
    """Writes every event, but for secrets, to events.jsonl, and metrics to metrics.jsonl.

    A run goes on where that fails: `warn` is called once, and the lines are written with the next ones.

    Args:
        recipe: of the run, for rounds that a killed hub did not record; None: there are none.
    """

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None] = lambda _: None,
        recipe: Recipe | None = None,
    ) -> None:
        self.events = appended(folder / EVENTS)
        self.metrics = metrics_of(folder, recipe)
        self.file = appended(folder / METRICS)
        self.warn = warn
        self.failing = False

    def show(self, event: events.Event) -> None:
        if isinstance(event, events.RunStarted):
            head, _, place = event.url.partition("@")
            event = dataclasses.replace(event, url=f"{head.partition('.')[0]}.***@{place}")
        if isinstance(event, events.OfExtension):
            event = event.recorded()
        if said := sentence(event) or (step_line(event, 0) if isinstance(event, events.Step) else ""):
            logging.getLogger(TOLD).info("%s", said)
        try:
            self.events.write(events.as_json(event) + "\n")
            self.events.flush()
            for line in self.metrics.lines(event):
                self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.failing = True
                self.warn(f"{EVENTS} cannot be written: {error.strerror}; the run goes on")

    def close(self) -> None:
        for file in (self.events, self.file):
            with suppress(OSError):  # warned of already
                file.close()


def metrics_of(folder: Path, recipe: Recipe | None) -> Metrics:
    """Return what converts the events of the run in a folder to lines, those of before included that its
    file lacks."""
    of = () if recipe is None else (recipe.training.global_batch_size, recipe.objective.named)
    return Metrics(folder / LEDGER, read_written(folder / METRICS), *of)


def appended(path: Path) -> TextIO:
    """Open the file to append lines, after ending a line that a killed launch left incomplete."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def log_to(path: Path | None, verbose: int) -> None:
    """Send the log records of our rooms to the run's log, and with -v to stderr as well."""
    level = logging.DEBUG if verbose > 1 else logging.INFO
    logging.raiseExceptions = False  # a log on a full disk is no reason for tracebacks on the terminal
    targets: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")] if path else []
    if verbose:
        stderr = logging.StreamHandler(Stderr())
        # tracebacks are the command's to print
        stderr.addFilter(lambda record: not record.exc_info and record.name != TOLD)
        targets.append(stderr)
    for handler in targets:
        handler.setFormatter(LogLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for room in ROOMS:
        logger = logging.getLogger(room)
        logger.setLevel(level)
        logger.handlers = targets or [logging.NullHandler()]
        logger.propagate = False
    # peft imports it, and it then warns of kernels that this machine lacks and nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # It prints each try at a hub that does not answer; the error that follows says so once.
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


class LogLines(logging.Formatter):
    """Formats a record as one line, whoever has written its words; the lines of a traceback follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record), None)

    def format(self, record: logging.LogRecord) -> str:
        return paragraphs(super().format(record))


class Stderr:
    """Writes to the current sys.stderr, which a live view replaces."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def datasets_of(recipe: Recipe) -> list[Dataset]:
    return [*recipe.datasets, *recipe.eval_datasets]


def with_data_here(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with its local data sets as the run's folder has them, where their paths do not."""

    def here(number: int, dataset: Dataset) -> Dataset:
        place = folder / DATA / str(number)
        if not place.is_dir() or Path(dataset.path).exists():
            return dataset
        name = Path(dataset.path).name
        return dataset.model_copy(update={"path": str(place / name if (place / name).exists() else place)})

    found = [here(n, dataset) for n, dataset in enumerate(datasets_of(recipe))]
    many = len(recipe.datasets)
    return recipe.model_copy(update={"datasets": tuple(found[:many]), "eval_datasets": tuple(found[many:])})


COPY_AGAIN = "copy or download it again, from where it was right"
KEY, OF_BASE = "file:", "base/"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes_of(folder: Path, names: Iterable[str], base: Iterable[BaseFile]) -> dict[str, str]:
    """Return the keys of an origin: for files and folders of the run's folder, and for the base's files."""
    found = {KEY + OF_BASE + file.name: file.sha256 for file in base}
    for name in names:
        paths = sorted((folder / name).iterdir()) if (folder / name).is_dir() else [folder / name]
        found |= {
            KEY + path.relative_to(folder).as_posix(): sha256_of(path) for path in paths if path.is_file()
        }
    return found


def begun_files(origin: Mapping[str, str]) -> dict[str, str]:
    """Return name -> sha256 of the files in the run's folder."""
    names = {key.removeprefix(KEY): sha256 for key, sha256 in origin.items() if key.startswith(KEY)}
    return {name: sha256 for name, sha256 in names.items() if not name.startswith(OF_BASE)}


def check_begun_files(folder: Path, origin: Mapping[str, str], below: str = "") -> None:
    """Raise Failure (altered) for the first file of the run's folder that is not what the run began with.

    Args:
        below: only files in this folder of it.
    """
    for name, expected in begun_files(origin).items():
        path = folder / name
        if not name.startswith(below):
            continue
        found = sha256_of(path) if path.is_file() else "that of no file"
        if found != expected:
            raise damaged(path, f"its sha256 is {found}, the run began with {expected}", COPY_AGAIN)


def altered_base_files(origin: Mapping[str, str], base: Iterable[BaseFile]) -> list[str]:
    """Name the files of the base model that are not those that the run began with, or are missing."""
    wanted = {
        key.removeprefix(KEY + OF_BASE): s for key, s in origin.items() if key.startswith(KEY + OF_BASE)
    }
    there = {file.name: file.sha256 for file in base}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
