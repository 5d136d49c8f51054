"""The global model as the ledger has it, and its snapshots, written in a thread while training goes on.

    outputs/<name>/snapshots/<round>/   the global model before that round, a folder for `from_pretrained`

A snapshot is due every `checkpoint.save_steps` steps; the newest `save_total_limit` stay, and the newest are
offered to joiners. A failure to write one is only a warning: the ledger has all that is needed to write it
later.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cocktail_cli.assembly import ModelOnDisk, used
from cocktail_cli.errors import disk_is_full, explain
from cocktail_cli.foreign_text import paragraphs
from cocktail_cli.machine import read_run
from cocktail_cli.ui import Checkpoint, Event, ProgressMeter, Warning
from transport import Ledger
from transport.protocol import count_samples, messages

from . import run_folder as in_folder

if TYPE_CHECKING:
    from recipes.algorithm import GlobalModel
    from recipes.config import Recipe
    from recipes.snapshots import Fold, Snapshot
    from recipes.weight_files import Layout

log = logging.getLogger(__name__)

ProgressHook = Callable[[int, int], None]  # (bytes done, bytes in all)
Dtype = Literal["float32", "bfloat16", "float16"]  # of exported weights

WEIGHTS = ("adapter_model.safetensors", "model.safetensors")  # of an adapter, of a whole model
CARD = "README.md"
OBJECT = re.compile(r"(hashes/)?snapshot/([0-9]{1,18})/model\.safetensors")
OFFERED = 2  # the newest so many
ENDS_WITHIN = 10.0  # seconds for a fold that was told to stop


@dataclass(frozen=True)
class LoadedModel:
    """The global model in memory, with the names of its tensors."""

    global_model: GlobalModel
    layout: Layout


@dataclass(frozen=True)
class CommittedModel:
    """The global model of a run: the base or a snapshot, plus the ledger's packets (a fold)."""

    recipe: Recipe
    base: Path  # folder of the base model
    folder: Path  # the run's output folder
    tell: Callable[[str], object] = log.warning  # told which snapshot is damaged
    whole: set[Path] = field(default_factory=set, compare=False)  # snapshots whose every byte was checked

    @property
    def snapshots(self) -> Path:
        return self.folder / in_folder.SNAPSHOTS

    def valid_snapshots(self, ledger: Ledger) -> list[Snapshot]:
        """List the snapshots whose fingerprints this very ledger has, by round. With rounds in flight the
        newest rows have none yet; a snapshot of those was checked at an earlier row when it was written."""
        from recipes.snapshots import list_snapshots

        said = {row.round: row.fingerprint for row in ledger.rounds()}
        return [
            one
            for one in list_snapshots(self.snapshots, ledger.run)
            if said.get(one.round) in (one.fingerprint, 0)
        ]

    def is_whole(self, one: Snapshot, stop: Callable[[], bool] = lambda: False) -> bool:
        """Compare a snapshot's files with their hashes, unless it was done before."""
        from recipes.snapshots import altered_file

        if one.folder not in self.whole:
            if name := altered_file(one, stop):
                self.tell(f"{one.folder / name} is damaged: this snapshot is not used")
                return False
            self.whole.add(one.folder)
        return True

    @contextmanager
    def fold(
        self,
        round: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        progress: ProgressHook = lambda done, total: None,
        snapshots: bool = True,
    ) -> Iterator[Fold]:
        """Open the fold up to `round` (None: all committed rounds), from the newest snapshot not after it,
        else (or without `snapshots`) from the base. Valid inside the `with`.
        """
        from compress.coding import FileSlice
        from recipes.algorithm import compressor_of
        from recipes.models import open_trained
        from recipes.snapshots import Fold, KnownFingerprint

        with Ledger(self.folder / in_folder.LEDGER, write=False) as ledger:
            rows = ledger.rounds()
            round = len(rows) if round is None else round
            found = [row for row in rows[: round + 1] if row.fingerprint]
            known = [KnownFingerprint(row.round, row.fingerprint) for row in found][-1:]
            valid = self.valid_snapshots(ledger) if snapshots else []
            newest = [one for one in reversed(valid) if one.round <= round]
            begin = next((one for one in newest if self.is_whole(one, stop)), None)
            start = begin.round if begin else 0
            records = [row.record for row in rows[start:round]]
            source = open_trained(self.recipe, self.base, begin.folder if begin else None)
            with closing(source) as vector, open(ledger.log_path, "rb", buffering=0) as packets:
                yield Fold(
                    run=ledger.run,
                    mix=compressor_of(self.recipe.compression),
                    seed=self.recipe.training.seed,
                    source=vector,
                    start=start,
                    packets=[FileSlice(packets, record.payload, record.length) for record in records],
                    known=known[0] if known else None,
                    stop=stop,
                    progress=progress,
                )

    def load(self, round: int | None = None) -> LoadedModel:
        """Load the global model before `round` (None: of all committed rounds) into memory."""
        with self.fold(round) as found:
            *_, model = replayed(found)
            return LoadedModel(model, found.source.layout)

    def write_model(
        self,
        folder: Path,
        dtype: Dtype | None = None,
        progress: ProgressHook = lambda done, total: None,
        round: int | None = None,
    ) -> int:
        """Write the global model before `round` (None: of all committed rounds); return that round. `dtype`:
        None is that of the base; adapters stay float32."""
        from recipes.errors import ModelError
        from recipes.models import FLOAT32, convert_file_dtype, weight_dtypes
        from recipes.weight_files import atomic_folder, weights_file_in

        dtypes = FLOAT32 if self.recipe.lora and dtype is None else weight_dtypes(self.base, dtype)
        with self.fold(round, progress=progress) as fold, atomic_folder(folder) as part:
            fold.write(part)
            try:
                convert_file_dtype(weights_file_in(part), dtypes)
            except ModelError as error:
                if dtype is not None:
                    raise
                self.tell(f"{error}: the model is written in float32")
            self.write_beside(part, fold)
            self.wrote_model(part, fold.round)
        return fold.round

    def write_merged(self, folder: Path, dtype: Dtype | None = None, round: int | None = None) -> int:
        """Write the same model with its adapters merged into the base weights."""
        from recipes.models import weight_dtypes, write_merged
        from recipes.weight_files import atomic_folder

        loaded, tokenizer = self.load(round), self.folder / in_folder.TOKENIZER
        model, dtypes = loaded.global_model, weight_dtypes(self.base, dtype)
        with atomic_folder(folder) as part:
            trained = loaded.layout.by_name(model.vector)
            write_merged(part, self.recipe, self.base, trained, tokenizer, dtypes)
            (part / CARD).write_text(self.card(part, model.round, merged=True), encoding="utf-8")
            self.wrote_model(part, model.round, merged=True)
        return model.round

    def wrote_model(self, folder: Path, rounds: int, merged: bool = False) -> None:
        """Let extensions add to a model's folder, once all else is written there."""
        for one in used(self.recipe):
            one.wrote_model(self, folder, rounds, merged)

    def wrote_run(self, rounds: int) -> None:
        """Let extensions add to the run's folder, once nothing else is written there any more. Raises
        LedgerError where a reader of the ledger is in the way."""
        for one in used(self.recipe):
            one.wrote_run(self, rounds)

    def write_beside(self, folder: Path, fold: Fold) -> None:
        """Write config, tokenizer and model card beside the weights; before these they are of float32."""
        from recipes.models import configs_with_eos, weight_dtypes, with_dtype
        from recipes.weight_files import write_model_files

        tokenizer = self.folder / in_folder.TOKENIZER
        texts = configs_with_eos(fold.source.config_files, self.recipe.model, tokenizer)
        texts = with_dtype(texts, weight_dtypes(folder))
        write_model_files(folder, {**texts, CARD: self.card(folder, fold.round)}, tokenizer)

    def card(self, folder: Path, rounds: int, merged: bool = False, more: Sequence[str] = ()) -> str:
        """Render the card of the model in `folder`: who trained it, on what, and `more` lines."""
        from recipes.downloads import Licence
        from recipes.models import RunSummary, cached_commit, render_card, weight_dtypes

        samples, record = Counter[str](), read_run(self.folder)
        licence = Licence(**record.licence) if record else Licence()
        _, confirmed, met = record.reach.rpartition(", from ") if record else ("", "", "")
        with Ledger(self.folder / in_folder.LEDGER, write=False) as ledger:
            for counted in ledger.counted():
                samples[counted.peer] += count_samples(counted.ids)
            losses = {row.round: row.loss for row in ledger.evaluations()}
            before = losses.get(0) if rounds else None
            made = RunSummary(
                ledger.run,
                rounds,
                cached_commit(self.base),
                samples,
                losses.get(rounds),
                before,
                merged,
                str(weight_dtypes(folder)),
                met if confirmed else "",
                licence,
                [*more, *(line for one in used(self.recipe) for line in one.described(self.recipe, ledger))],
            )
        return paragraphs(render_card(self.recipe, made))


def replayed(found: Fold) -> Iterator[GlobalModel]:
    """Carry out a fold in memory; yield the model before each of its packets, and after the last."""
    import torch

    from recipes.algorithm import GlobalModel, replay

    vector = torch.from_numpy(found.source.read(0, found.source.layout.size))
    start = GlobalModel(vector, found.mix, found.seed, found.start)
    return replay(start, (bytes(packet[:]) for packet in found.packets))


class SnapshotThread:
    """Writes the snapshots of one run. Its methods are for the thread that made it.

    Args:
        every: steps between two; 0: none are made.
        steps: of the whole run, which ends with the model itself.
        offer: announces the newest to joiners; called from either thread.
        use: takes the base of a run that begins, and each snapshot.
        news: takes the events for the views.
    """

    def __init__(
        self,
        model: CommittedModel,
        every: int,
        steps: int,
        offer: Callable[[list[messages.SnapshotOffer]], None],
        use: Callable[[ModelOnDisk], None] = lambda _: None,
        news: queue.SimpleQueue[Event] | None = None,
    ) -> None:
        self.every, self.steps, self.offer, self.use = every, steps, offer, use
        self.limit = model.recipe.checkpoint.save_total_limit
        self.news = news or queue.SimpleQueue[Event]()
        self.warned: set[Event] = set()
        self.last = 0  # step of the newest snapshot, or of the one being made
        self.fresh = True  # no round is committed yet
        self.stopped = threading.Event()
        self.due: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # (round, step); (-1, -1): the end
        self.thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self.model = replace(model, tell=lambda what: self.news.put(Warning(what)))

    def start(self) -> None:
        """Remove what a killed hub had begun, offer what it had finished, and wait for steps."""
        from recipes.snapshots import remove_unfinished_snapshots

        remove_unfinished_snapshots(self.model.snapshots)
        with Ledger(self.model.folder / in_folder.LEDGER, write=False) as ledger:
            rows, whole = ledger.rounds(), self.model.valid_snapshots(ledger)
            self._offer(ledger, whole)
        if whole:
            self.last = rows[min(whole[-1].round + 1, len(rows) - 1)].step
        self.fresh = not rows
        self.thread.start()
        if rows:
            self.committed(rows[-1].round, rows[-1].step)

    def committed(self, round: int, step: int) -> None:
        """Note a durable round, after which the run is at `step`; return at once."""
        if self.every and step // self.every > self.last // self.every and step < self.steps:
            self.last = step
            self.due.put((round, step))

    def close(self) -> None:
        """Cancel a snapshot under way; nothing of it stays."""
        self.stopped.set()
        self.due.put((-1, -1))
        if self.thread.is_alive():
            self.thread.join(ENDS_WITHIN)

    # ---- in the thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.fresh:
            self.use(ModelOnDisk(self.model.base, 0, 0, self._tell, self.stopped.is_set))
        self._drop_damaged()
        while not self.stopped.is_set():
            round, step = self.due.get()
            while not self.due.empty():  # the last fold took longer than `every` steps
                round, step = self.due.get()
            if round < 0:
                return
            try:
                self._make(round, step)
            except Exception as error:  # the run does not depend on it: say what happened, and go on
                log.warning("snapshot of round %d", round, exc_info=True)
                if disk_is_full(error):
                    self._warn(f"no snapshots while the disk is full: {getattr(error, 'strerror', error)}")
                else:
                    self._warn(f"no snapshot of round {round}: {explain(error).message}")

    def _drop_damaged(self) -> None:
        """Remove the snapshots of an earlier process that are damaged, and fold the newest round in their
        place: the ledger has all that is in them."""
        from recipes.snapshots import SnapshotCancelled, broken_files, remove_snapshot

        try:
            with Ledger(self.model.folder / in_folder.LEDGER, write=False) as ledger:
                found, rows = self.model.valid_snapshots(ledger), ledger.rounds()
                damaged = [one for one in found if not self.model.is_whole(one, self.stopped.is_set)]
                if damaged:
                    self._offer(ledger, [one for one in found if one not in damaged], always=True)
        except SnapshotCancelled:
            return
        except Exception as error:  # the run does not depend on it
            log.warning("snapshots of before", exc_info=True)
            self._warn(f"the snapshots of before are not checked: {explain(error).message}")
            return
        broken = broken_files(self.model.snapshots)
        for path in broken:
            self._warn(f"{path} is damaged or gone: this snapshot is not used")
        for folder in {*(one.folder for one in damaged), *(path.parent for path in broken)}:
            remove_snapshot(folder)
            self._warn(f"the snapshot {folder} was removed, as the ledger has all that is in it")
            if self.every and rows:
                self.due.put((rows[-1].round, rows[-1].step))

    def _make(self, round: int, step: int) -> None:
        from recipes.snapshots import SnapshotCancelled, remove_snapshot, write_chunk_hashes, write_sums
        from recipes.weight_files import atomic_folder, weights_file_in

        began, folder = time.monotonic(), self.model.snapshots / str(round)
        meter = ProgressMeter(self.news.put, f"snapshot of round {round}", "bytes")
        try:
            with self.model.fold(round, self.stopped.is_set, meter) as fold, atomic_folder(folder) as part:
                if not fold.source.on_disk:
                    self._warn(
                        f"{self.model.base} has its weights under other names or not as safetensors: for the "
                        f"first snapshot the model is loaded, {4 * fold.source.layout.size / 1e9:.1f} GB",
                    )
                self.model.write_beside(part, fold)
                number = fold.write(part, write_sums(part))
                write_chunk_hashes(part, self.stopped.is_set)
        except SnapshotCancelled:
            return
        self.model.whole.add(folder)
        with Ledger(self.model.folder / in_folder.LEDGER, write=False) as ledger:
            whole = self.model.valid_snapshots(ledger)
            self._offer(ledger, whole)
        for old in whole[: -self.limit]:
            remove_snapshot(old.folder)
        size, seconds = weights_file_in(folder).stat().st_size, time.monotonic() - began
        self.news.put(Checkpoint(round, step, str(folder), size, seconds, f"{number:016x}"))
        self.use(ModelOnDisk(folder, round, step, self._tell, self.stopped.is_set))

    def _offer(self, ledger: Ledger, whole: list[Snapshot], always: bool = False) -> None:
        offers = []
        for one in whole[-min(OFFERED, self.limit) :]:
            record = ledger.record(one.round)
            assert record is not None, "its fingerprint was found there"
            digest = hashlib.sha256(one.hashes.read_bytes()).hexdigest()
            offers.append(
                messages.SnapshotOffer(one.round, one.weights.stat().st_size, digest, record.offset)
            )
        if offers or always:
            self.offer(offers)

    def _warn(self, message: str) -> None:
        self._tell(Warning(message))

    def _tell(self, event: Event) -> None:
        """Show an event, a warning once."""
        if not isinstance(event, Warning) or event not in self.warned:
            self.news.put(event)
        if isinstance(event, Warning):
            self.warned.add(event)


def snapshot_object(snapshots: Path, name: str) -> bytes | Path:
    """Find a snapshot's weights, or their chunk hashes, by object name. Raises KeyError."""
    match = OBJECT.fullmatch(name)
    if match is not None:
        for path in (snapshots / match[2] / weights for weights in WEIGHTS):
            if path.is_file():
                return path.with_name(path.name + ".sha256").read_bytes() if match[1] else path
    raise KeyError(f"there is no {name}")
