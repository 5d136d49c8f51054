"""One launch from the recipe to the model on disk: prepare, open the hub, follow it, hand over.

Of a resumed run, keys, name, address and port are those of run.json, so the URL that volunteers hold stays
valid and their links reconnect by themselves; options of this machine are those of its launch. Corpus and
base model are compared by hash with what they were: samples are known by number alone, and a number must mean
the same row.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cocktail_cli import __version__, machine
from cocktail_cli.assembly import (
    NONE_GIVEN,
    Given,
    HostParts,
    ModelOnDisk,
    Server,
    ViewParts,
    dialled,
    for_peers,
    hub_extensions,
    leads,
    model_here,
    pick_devices,
    pinned,
    used,
    views_of,
)
from cocktail_cli.errors import EXIT, Failure, Interrupted, disk_is_full, explain, out_of_disk, writing_to
from cocktail_cli.installation import command_elsewhere
from cocktail_cli.machine import FORMAT, RunRecord, check_record, hashed_files
from cocktail_cli.recipe_request import RecipeRequest, room_for
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import ProgressMeter, View, events, poll_status, timestamp

from . import run_folder as in_folder
from .local_peers import (
    LEAVE_WITHIN,
    PARENT_ENDED,
    DetachedView,
    LifeLine,
    LocalPeers,
    LocalSettings,
    start_detached,
)
from .run_folder import altered_base_files, check_begun_files, hashes_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.config import Recipe
    from recipes.data import Corpus, StreamedCorpus, TypedPrompt
    from recipes.downloads import Licence
    from recipes.models import Base
    from transport import Hub, Ledger, RunKeys, RunSettings
    from transport.protocol import RunEnded

    from .narrator import Narrator
    from .run_delegate import RunDelegate
    from .snapshot_thread import SnapshotThread

STATUS_TIMEOUT = 5.0  # seconds for the hub to answer how its peers are
TICK = 0.2  # seconds between two looks at local peers and signals
PATIENCE = 3  # rounds in a row whose loss is above loss_watchdog_threshold
HUB_ENDS_WITHIN = 15.0  # seconds for the hub to finish downloads under way, and close
STOPS_WITHIN = 24.0  # seconds from the first signal until hub and local peers are gone
# exit code of a run -> code of the failure
FAILURES = {0: "no_result", 6: "rejected", 7: "no_result", 8: "out_of_memory"}
# options that run.json remembers
REMEMBERED = [one.name for one in fields(LocalSettings) if one.name not in ("given", "door")]


# ---- a run that goes on ------------------------------------------------------------------------------------


def check_unfinished(record: RunRecord) -> None:
    """Raise Failure (output_in_use, altered) where a run cannot go on."""
    folder = Path(record.output_dir)
    check_record(folder)
    check_goes_on(record)
    in_folder.check_unlocked(folder, record)


def check_goes_on(record: RunRecord) -> None:
    """Raise Failure (output_in_use) where a run is over, or is in the format of another version."""
    if record.over:
        hint = f"its model: {record.output_dir}, or cocktail export {record.run} -o DIR"
        raise Failure("output_in_use", f"the run {record.run} in {record.output_dir} is over", hints=(hint,))
    check_format(record)


def check_format(record: RunRecord) -> None:
    """Raise Failure (output_in_use) where a run's folder is in the format of another version."""
    if record.format == FORMAT:
        return
    version = record.version or "of a version that it does not name"
    raise Failure(
        "output_in_use",
        f"the run {record.run} in {record.output_dir} was written by cocktail {version}, in format "
        f"{record.format}: cocktail {__version__} goes on with runs of format {FORMAT}",
        hints=(
            "resume it with the version that wrote it",
            f"its model so far: cocktail export {record.run} -o DIR",
        ),
    )


def recipe_to_resume(record: RunRecord) -> tuple[Recipe, str]:
    """Return the recipe of a run that is to go on, its revisions pinned to commits; and a sentence where its
    file was made anew.

    Raises Failure: output_in_use, altered.
    """
    check_goes_on(record)
    folder, recipe_hash = Path(record.output_dir), record.recipe_hash
    mended = in_folder.mend_recipe(folder, recipe_hash)
    return in_folder.recipe_in(folder, recipe_hash), mended


def arguments_of(local: LocalSettings, peers: int) -> dict[str, Any]:
    """Return what run.json remembers of how the run is hosted; its address is there already."""
    added = {name: value for options in local.given.values() for name, value in options.items()}
    return {"peers": peers, **{name: getattr(local, name) for name in REMEMBERED}, **added}


def hosted_before(record: RunRecord, given: Given = NONE_GIVEN, **typed: Any) -> tuple[LocalSettings, int]:
    """Return local settings and number of peers as the run was launched, but for what is typed now; of that,
    options of extensions are `given`."""
    known = {name: record.arguments[name] for name in ("peers", *REMEMBERED) if name in record.arguments}
    now = {"peers": 1} | known | {name: value for name, value in typed.items() if value is not None}
    peers = now.pop("peers")
    return LocalSettings(**now, given=for_peers(given, record.arguments)), peers


def url_at(record: RunRecord, port: int) -> str:
    """Return the run's URL, with another port where the hub now listens at another one.

    A URL whose port is not the hub's is that of a router, which forwards it.
    """
    from transport import parse_url

    url = parse_url(record.url)
    return record.url if url.port != record.port else str(replace(url, port=port))


def same_base(record: RunRecord, recipe: Recipe, origin: Mapping[str, str]) -> Base:
    """Find the base model the run began with. Raises Failure (model_invalid) where its files have changed.

    Args:
        origin: what its ledger says that it began with.
    """
    from recipes.downloads import Licence
    from recipes.models import Base, base_manifest, cached_commit, fetch_model

    folder, model = Path(record.base), recipe.model
    if not folder.is_dir() and cached_commit(folder) is not None:  # the cache was cleared since
        folder = fetch_model(model.model_name_or_path, model.model_revision, model.trust_remote_code)
    code = model.trust_remote_code
    files = base_manifest(folder, code, hashed_files()) if folder.is_dir() else ()
    base = Base(folder, files, Licence(**record.licence))
    if base.digest != origin["base"]:
        altered = folder / altered_base_files(origin, files)[0]
        raise Failure(
            "model_invalid",
            f"the base model in {folder} is not the one {record.run} began with: "
            f"{altered} is altered or gone",
            hints=("bring back its files as they were: the ledger's packets fit that model alone",),
        )
    return base


def checked_recipe(record: RunRecord) -> Recipe:
    """Load the recipe of a run whose model is to be written, once all that it is made of was compared with
    what the run began with and has decided: rows, recipe, tokenizer, base. Raises Failure (altered,
    model_invalid), LedgerError."""
    from transport import Ledger

    folder = Path(record.output_dir)
    with Ledger(folder / in_folder.LEDGER, write=False) as ledger:
        lacking, origin = ledger.check_rows(), ledger.origin
    if lacking and not in_folder.is_locked(folder):
        in_folder.raise_lacking(folder, lacking)
    recipe = in_folder.recipe_in(folder, origin["recipe"])
    check_begun_files(folder, origin)
    same_base(record, recipe, origin)
    return recipe


def reopened_ledger(record: RunRecord, wal: bool) -> Ledger:
    """Open the ledger of a run that goes on, to write. Raises LedgerDamaged, with what is left to begin from,
    and what else Ledger raises."""
    from transport import Ledger
    from transport.protocol import LedgerDamaged

    folder = Path(record.output_dir)
    try:
        return Ledger(folder / in_folder.LEDGER, run=record.run, samples=None, wal=wal)
    except LedgerDamaged as error:
        raise LedgerDamaged(str(error), (*error.hints, *snapshot_hint(folder))) from None


def snapshot_hint(folder: Path) -> tuple[str, ...]:
    """Name the newest snapshot of a run's folder, a model to go on from where its ledger is lost."""
    place = folder / in_folder.SNAPSHOTS
    rounds = [int(path.name) for path in place.iterdir() if path.name.isdecimal()] if place.is_dir() else []
    if not rounds:
        return ()
    newest = place / str(max(rounds))
    return (f"without a copy: a new run can begin from {newest}, the model after {max(rounds)} rounds",)


def check_corpus(record: RunRecord, recipe: Recipe, corpus: Corpus | StreamedCorpus) -> None:
    """Raise Failure (dataset_invalid) where the data are not those the run began with."""
    if corpus.digest() != record.data_sha256:
        names = ", ".join(dataset.path for dataset in (*recipe.datasets, *recipe.eval_datasets))
        raise Failure(
            "dataset_invalid",
            f"the data ({names}) are not those that {record.run} began with",
            hints=("a run counts its samples by number: bring the data back as they were, or begin anew",),
        )


# ---- a launch ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchSettings:
    """One launch as its user asked for it."""

    output_dir: Path | None
    listen: machine.ListenAddress
    local: LocalSettings
    peers: int  # to start on this machine
    recipe: str | None = None  # None: the neutral recipe, for `model` and `data`
    overrides: Sequence[str] = ()
    data: str | None = None
    model: str | None = None
    guests: int = 0  # peers from elsewhere that the first step waits for
    run: RunRecord | None = None  # to go on with: its recipe is taken, and its folder
    fresh: bool = False
    detach: bool = False  # start another process that hosts the run
    detached: bool = False  # this is that process
    share_gated_base: bool = False  # serve the files of a gated base
    life_line: bool = False  # stop when stdin ends, as the launching process has ended then
    drop_error_feedback: bool = False  # of `cocktail resume`: go on without it, where it is lost
    verbose: int = 0
    given: Given = field(default_factory=dict)  # options of extensions


def check_machine(wanted: LaunchSettings) -> None:
    """Raise Failure or OSError where this machine lacks an address or a device of the launch: now, and not
    once model and data are prepared."""
    machine.check_home()
    machine.free_address(wanted.listen)
    for device in wanted.local.devices_of(wanted.peers):
        devices = pick_devices(device, wanted.local.given)
        machine.check_memory_limit(devices, wanted.local.vram_limit)


def launch_run(wanted: LaunchSettings, view: View) -> int:
    """Resolve the recipe, claim the output folder and host the run; or start a process that does.

    Returns the exit status: after a pause by SIGTERM one at which a supervisor starts it again.

    Raises: Failure and the errors of recipes; nothing is made for a recipe or a folder that cannot be used.
    """
    life_line = LifeLine(grace=0.0) if wanted.life_line else None  # until the hub opens, nothing needs time
    request, mended, old = None, "", wanted.run
    if old is None:
        request = RecipeRequest.of(wanted.recipe, wanted.overrides, wanted.data, wanted.model)
        recipe = request.load()
    else:
        recipe, mended = recipe_to_resume(old)
    asked_hash, notes = recipe.recipe_hash, list[events.Event]([events.Warning(mended)] if mended else [])
    machine.check_trust(recipe, wanted.local.trust_remote_code)
    folder = (wanted.output_dir or Path(recipe.output_dir)).resolve()
    folder = in_folder.unused_folder(folder) if wanted.fresh else folder
    if old is None:
        in_folder.check_unused(folder, asked_hash)
    else:
        check_unfinished(old)
    if not wanted.detach:  # else the process in the background does so
        view.show(events.Progressed("starting"))  # the imports below take seconds
        check_machine(wanted)
    if old is None:
        in_folder.claim(folder, asked_hash)
    if wanted.detach:
        start_detached(sys.argv[1:], folder, view)
        return 0
    in_folder.log_to(folder / in_folder.LOG, wanted.verbose)
    if request is not None:
        recipe, notes = settled(request, wanted)

    def warn(what: str) -> None:
        view.show(events.Warning(what))

    views = [DetachedView(view) if wanted.detached else view]
    session = HostSession(recipe, folder, views, old)
    views += views_of(ViewParts(recipe, folder, session.news.put), wanted.given)
    views.insert(1, in_folder.Recorder(folder, warn, recipe))
    with closing(session), writing_to(folder):
        session.asked_hash = asked_hash
        for note in notes:
            session.show(note)
        session.life_line, session.share_gated_base = life_line, wanted.share_gated_base
        session.drop_error_feedback, session.given = wanted.drop_error_feedback, wanted.given
        return session.run(wanted.listen, wanted.local, wanted.peers, wanted.guests)


def settled(request: RecipeRequest, wanted: LaunchSettings) -> tuple[Recipe, list[events.Event]]:
    """Return the recipe of a new run, and what its host should know before anything is prepared.

    Raises: the errors of recipes, for a model or data that cannot be used.
    """
    from recipes.planning import unusual_settings

    local, room = wanted.local, None
    if request.is_own:
        room = room_for(local.devices_of(wanted.peers), local.each, local.vram_limit)
    request, said = request.choose(room)
    recipe = request.described()
    warnings = [
        f"{found.text} ({found.hint})" if found.hint else found.text for found in unusual_settings(recipe)
    ]
    return recipe, [*map(events.Progressed, said), *map(events.Warning, warnings)]


class HostSession:
    """Hosts one run, from a resolved recipe to the model on disk.

    Args:
        folder: the run's output folder, claimed.
        views: all of them are shown the events, the terminal's first.
        resumed: the record of the run to go on with; None: a new run.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        views: list[View],
        resumed: RunRecord | None = None,
    ) -> None:
        self.recipe, self.folder, self.views, self.resumed = recipe, folder, views, resumed
        self.news = SimpleQueue[events.Event]()  # from other threads
        self.asked_hash = recipe.recipe_hash  # before revisions are pinned to commits, and anything chosen
        self.record: RunRecord  # from `open` on
        self.life_line: LifeLine | None = None
        self.share_gated_base = False
        self.drop_error_feedback = False
        self.given: Given = {}  # options of extensions
        self.narrator: Narrator | None = None  # once it runs
        self.prompt: TypedPrompt | None = None  # of a new run, to try its model with; from `prepare` on
        self.prepared: RunDelegate | None = None  # what `prepare` made, where it was called before
        # Called just before the hub listens, where this machine takes over: it uses the port until then.
        self.free_port: Callable[[], None] | None = None
        self.arguments: dict[str, Any] = {}  # by which `resume` hosts the run again
        self.stop_reason, self.pauses = "", False
        self.stop_by = float("inf")  # on the monotonic clock

    def show(self, event: events.Event) -> None:
        if isinstance(event, events.Eval) and self.narrator is not None:
            self.narrator.evaluation(event.round, event.loss)
        for view in self.views:
            view.show(event)

    def show_news(self) -> None:
        """Show what other threads have to tell."""
        while not self.news.empty():
            self.show(self.news.get())

    def close(self) -> None:
        """Close all views but the terminal's, which is shown what they still have to tell."""
        while len(self.views) > 1:
            self.views.pop().close()
        self.show_news()

    def meter(self, what: str, unit: str = "bytes") -> ProgressMeter:
        return ProgressMeter(self.show, what, unit)

    def ask_pause(self, why: str) -> None:
        """Ask for the end of this process; `resume` goes on with the run."""
        self.stop_reason, self.pauses, self.stop_by = why, True, time.monotonic() + STOPS_WITHIN

    def ask_end(self, why: str) -> None:
        """Ask for the end of the run, whose committed rounds become the model."""
        self.stop_reason, self.pauses, self.stop_by = why, False, time.monotonic() + STOPS_WITHIN

    def ask(self, why: str) -> None:
        """Pause where the process that started this one has ended, else end as it asks."""
        (self.ask_pause if why == PARENT_ENDED else self.ask_end)(why)

    def within(self, seconds: float) -> float:
        """Return `seconds`, or less where the run has to be stopped by then."""
        return max(0.0, min(seconds, self.stop_by - time.monotonic()))

    def run(self, listen: machine.ListenAddress, local: LocalSettings, peers: int, guests: int = 0) -> int:
        """Host the run until it is over or paused; returns the exit status."""
        from recipes.training import learning_rate

        from .narrator import Narrator
        from .snapshot_thread import SnapshotThread

        if not self.recipe.datasets:
            peers = 0
        self.arguments = arguments_of(local, peers)
        with ExitStack() as ours:  # until the hub has it
            ledger = ours.enter_context(self.reopen()) if self.resumed else None
            work = self.prepared or self.prepare()
            ours.pop_all()
        narrator = self.narrator = Narrator(work.parameters, self.recipe.objective.named)
        # Before this there is nothing to end in good order: Ctrl-C is the usual KeyboardInterrupt.
        with ExitStack() as stack:
            signals = stack.enter_context(leave_on_signal(self.ask_pause, second=self.ask_end))
            if self.life_line is not None:
                stack.enter_context(self.life_line.leaving(self.ask, lambda: True))
            hub = self.open(work, narrator, ledger, listen, peers, guests)
            self._lead_here(hub, stack)
            door = self.door() if dialled(self.recipe) else None
            children = LocalPeers(self.folder, replace(local, door=door))
            steps = hub.settings.steps
            narrator.rate_at = learning_rate(self.recipe.training, steps)
            every = self.recipe.checkpoint.save_every(steps)
            offer = hub.offer if work.serves_snapshots else lambda _: None
            use = partial(model_here, work, given=self.given)
            snapshots = SnapshotThread(work.model, every, steps, offer, use, self.news)
            try:
                snapshots.start()
                children.start(self.record.local_url(), peers)
                ended = self.follow(hub, narrator, children, snapshots)
                children.finish(self.within(5.0))
            except BaseException as error:
                at_once = isinstance(error, Interrupted)
                reason = "stopped by its host" if at_once else explain(error).message
                hub.stop(now=True, reason=reason)
                self.stop_by = time.monotonic() if at_once else self.stop_by
                with suppress(OSError):  # of a full disk, perhaps the error itself
                    self.record_end("failed", narrator, reason)
                self.say_how_to_go_on()
                raise
            finally:
                snapshots.close()
                children.stop(self.within(LEAVE_WITHIN))
                if hub.join(self.within(HUB_ENDS_WITHIN)):
                    hub.ledger.close()
                    work.close()
            full = hub.error is not None and disk_is_full(hub.error)
            self.hand_over(work, narrator, ended, full)
            return EXIT["lost"] if self.pauses and signals.reason == "SIGTERM" else 0

    # ---- before --------------------------------------------------------------------------------------------

    def reopen(self) -> Ledger:
        """Open the ledger of a run that goes on, and say what had to be mended. Raises LedgerDamaged."""
        assert self.resumed is not None
        self.show(events.Progressed("checking the ledger"))
        ledger = reopened_ledger(self.resumed, self._on_this_machine())
        with ExitStack() as stack:
            stack.callback(ledger.close)
            for repair in ledger.mended:
                self.show(events.Warning(repair))
            if not self.free_port:  # each packet was checked when it came, and there is no time now
                ledger.check_packets(self.meter("checking the ledger"))
            stack.pop_all()
        return ledger

    def _on_this_machine(self) -> bool:
        """Tell whether the output folder is on a disk of this machine; warn where it is not."""
        remote = machine.network_file_system(self.folder)
        if remote is not None:
            text = f"{self.folder} is on a network file system ({remote}): each commit waits for it"
            self.show(events.Warning(f"{text}; -o on a disk of this machine is faster and safer"))
        return remote is None

    def prepare(self) -> RunDelegate:
        """Bring base model and corpus to this disk, and write the resolved recipe beside them."""
        from recipes.data import read_rows
        from recipes.models import prepare_base
        from transport import Ledger

        from .run_delegate import RunDelegate

        model = self.recipe.model
        for one in used(self.recipe, self.given):
            one.check_host(self.recipe)
        data = in_folder.with_data_here(self.recipe, self.folder)
        for dataset in (*data.datasets, *data.eval_datasets):
            # a missing file is found before a model is fetched
            read_rows(dataset, progress=self.meter(f"fetching {dataset.path}"))
        self.show(events.Progressed("preparing the base model"))
        if self.resumed is not None:
            with Ledger(self.folder / in_folder.LEDGER, write=False) as ledger:
                origin = ledger.origin
        if self.resumed is None:
            fetched = self.meter(f"fetching {model.model_name_or_path}")
            base = prepare_base(self.recipe, self.folder / in_folder.BASE, fetched, hashed_files())
            base = replace(base, licence=self._licence_for_peers(base))
            self._pin_recipe(base)
        else:
            base = same_base(self.resumed, self.recipe, origin)
            check_begun_files(self.folder, origin, in_folder.TOKENIZER)
        (self.folder / in_folder.TOKENIZER).mkdir(exist_ok=True)
        corpus = self.recipe.objective.corpus(self.recipe) or self._tokenized(data, base.folder)
        if self.resumed is not None:
            check_corpus(self.resumed, self.recipe, corpus)
        for line in corpus.found:
            self.show(events.Progressed(f"data: {line}"))
        for warning in corpus.warnings:
            self.show(events.Warning(warning))
        return RunDelegate(self.recipe, base, corpus, self.folder / in_folder.LEDGER)

    def _tokenized(self, data: Recipe, base: Path) -> Corpus | StreamedCorpus:
        """Build the corpus of a run's data sets; store the tokenizer and a prompt of a new run."""
        from recipes.data import typed_prompt
        from recipes.models import check_fit, check_trainable, load_tokenizer, open_tokenizer, vocabulary_of
        from recipes.weight_files import check_weights

        stored, model = self.folder / in_folder.TOKENIZER, self.recipe.model
        if self.resumed is None:
            tokenizer = load_tokenizer(model, base)
        else:
            tokenizer = open_tokenizer(stored, model.pad_token, model.trust_remote_code)
        check_fit(self.recipe, base)
        check_trainable(self.recipe, base)
        if self.resumed is None:
            for warning in check_weights(base, model.trust_remote_code):
                self.show(events.Warning(warning))
        corpus = self._build_corpus(data, tokenizer, vocabulary_of(base))
        if self.resumed is None:
            tokenizer.save_pretrained(stored)
            trained = (corpus.sample(position) for position in range(len(corpus)))
            self.prompt = typed_prompt(tokenizer, corpus.held_out or trained)
        return corpus

    def _licence_for_peers(self, base: Base) -> Licence:
        """Return the licence of the base. Files of a gated one are each peer's to fetch, unless the host may
        share them.

        Raises Failure (model_invalid) where a gated base is a conversion, which no peer can fetch.
        """
        name, licence = self.recipe.model.model_name_or_path, base.licence
        if licence.gated is None:
            text = f"the hub did not say whether {name} is gated: peers fetch its files from here"
            self.show(events.Warning(text))
        if not licence.gated:
            return licence
        if self.share_gated_base:
            self.show(events.Warning(f"{name} is gated ({licence}): you pass its files on to all peers"))
            return replace(licence, gated=False)
        if base.folder.is_relative_to(self.folder):
            hints = ("--share-gated-base, where its licence lets you pass it on",)
            raise Failure(
                "model_invalid",
                f"{name} is gated and has .bin weights, whose conversion no peer can fetch",
                hints=hints,
            )
        self.show(
            events.Progressed(f"{name} is gated ({licence}): each peer fetches it with its own account")
        )
        return licence

    def _pin_recipe(self, base: Base) -> None:
        """Replace revisions by commits, and write the recipe to the run's folder."""
        from recipes.models import pin_revisions

        self.recipe = pinned(pin_revisions(self.recipe, base.folder), base.folder)
        if (commit := self.recipe.model.model_revision) is not None:
            model = self.recipe.model.model_name_or_path
            self.show(events.Progressed(f"{model}: commit {commit}, for this run and all its peers"))
        text = self.recipe.to_json()
        (self.folder / in_folder.RESOLVED).write_text(text, encoding="utf-8")
        (self.folder / in_folder.RECIPE).write_text(in_folder.as_yaml(text), encoding="utf-8")

    def _build_corpus(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None
    ) -> Corpus | StreamedCorpus:
        from recipes.config import is_hub_id
        from recipes.data import build_corpus, count_rows, prefetch_dataset

        self.show(events.Progressed("reading the data"))
        meters: dict[str, ProgressMeter] = {}

        def tokenized(path: str, rows: int) -> None:
            if path not in meters:
                meters[path] = self.meter(f"tokenizing {path}", "rows")
            meters[path](rows, counts.get(path) or 0)

        counts = dict[str, int | None]()
        if not recipe.data.streaming:  # a stream reads only what it needs
            for dataset in (*recipe.datasets, *recipe.eval_datasets):
                if is_hub_id(dataset.path):
                    counts[dataset.path] = prefetch_dataset(dataset, self.meter(f"fetching {dataset.path}"))
                else:
                    counts[dataset.path] = count_rows(dataset)
        return build_corpus(recipe, tokenizer, self.folder / in_folder.STREAM, tokenized, vocabulary)

    def _lead_here(self, hub: Hub, stack: ExitStack) -> None:
        """Be reachable at all places that the run URL names, until the block ends."""
        from transport import RunKeys, parse_url

        if self.free_port is None:  # else it is reachable already
            pair, host = RunKeys(**self.record.keys).pair, machine.local_host(self.record.bind)
            server = Server(pair, host, hub.port, partial(hub.warn, ""))
            for lead in leads(parse_url(self.record.url).places, server):
                stack.enter_context(closing(lead))

    def open(
        self,
        work: RunDelegate,
        narrator: Narrator,
        ledger: Ledger | None,
        listen: machine.ListenAddress,
        peers: int,
        guests: int,
    ) -> Hub:
        """Open the hub, and write the record by which other commands find it. `ledger`: of a resumed run."""
        from recipes.models import package_versions
        from transport import Hub, RunKeys, ask_status, parse_url
        from transport.protocol import LedgerError

        from .run_delegate import settings_of

        old = self.resumed
        keys, name = (RunKeys(**old.keys), old.run) if old else (RunKeys.generate(), machine.new_name())
        usual = listen.port
        listen = listen if self.free_port else machine.free_address(listen)
        if listen.port != usual:
            self.show(events.Progressed(f"port {usual} is taken: this run listens on port {listen.port}"))
        settings = settings_of(work, name, peers, machine.own_keys().public, guests)
        ledger = ledger or self._new_ledger(work, keys, settings)
        try:
            if ledger.samples != settings.samples:
                raise LedgerError(
                    f"{ledger.folder} is of {ledger.samples} samples, not of {settings.samples}"
                )
            repairs = work.recover(ledger, self.drop_error_feedback)
            if old and not self.free_port:  # there is no time
                repairs += work.mend_fingerprints(ledger, old.state == "failed")
            for repair in repairs:
                self.show(events.Warning(repair))
        except BaseException:
            ledger.close()
            raise
        narrator.recall(ledger)
        machine.keep_freed_memory()
        if self.free_port:
            self.free_port()
        extensions = hub_extensions(HostParts(self.recipe, keys, ledger, work))
        hub = Hub((listen.bind, listen.port), keys, ledger, settings, work, extensions)
        work.tell = hub.warn
        hub.start()
        places = listen.places or (parse_url(old.url).places if old else ())
        reach = machine.reach_of(listen.bind, hub.port, listen.advertise, *places)
        url = str(keys.url(reach.host, reach.port, name, *places))
        if old and not listen.advertise and not listen.places:
            url = url_at(old, hub.port)  # as volunteers have it, whatever this machine is called today
        now: dict[str, Any] = {"url": url, "port": hub.port, "bind": listen.bind, "pid": os.getpid()}
        now |= {"arguments": self.arguments, "state": "running", "planned": settings.steps}
        now |= {"eval_loss": narrator.eval_loss, "version": __version__}
        if old and url != old.url:
            self.show(events.Warning(f"{name} has another address than before: volunteers need the new URL"))
        record = replace(old, **now) if old else self._new_record(work, keys, name, reach=reach.known, **now)
        self.record = record
        machine.save_run(record)
        self.show(
            events.RunStarted(
                run=name,
                url=url,
                recipe=self.recipe.name,
                recipe_hash=self.recipe.recipe_hash,
                parameters=work.parameters,
                steps=settings.steps,
                logging_steps=self.recipe.logging.logging_steps,
                output_dir=shown(self.folder),
                reach=reach.known,
                round=narrator.rounds,
                versions=package_versions(),
                install=command_elsewhere() or "",
                guests=guests if not narrator.rounds else 0,
                invitation=self.recipe.objective.invitation,
            )
        )
        poll_status(self.views[0], partial(ask_status, parse_url(record.local_url()), STATUS_TIMEOUT))
        return hub

    def _new_ledger(self, work: RunDelegate, keys: RunKeys, settings: RunSettings) -> Ledger:
        """Begin the ledger of a new run, on what the run begins with."""
        from transport import Ledger
        from transport.protocol import short_key

        origin = {"recipe": self.recipe.recipe_hash, "base": work.base.digest, "data": work.data_digest}
        origin["hub"] = short_key(keys.public)
        for one in used(self.recipe):
            origin |= one.origin(keys)
        origin |= hashes_of(self.folder, (in_folder.RECIPE, in_folder.TOKENIZER), work.base.files)
        place, wal = self.folder / in_folder.LEDGER, self._on_this_machine()
        return Ledger(place, run=settings.run, samples=settings.samples, wal=wal, origin=origin)

    def _new_record(self, work: RunDelegate, keys: RunKeys, name: str, **now: Any) -> RunRecord:
        """Describe a new run; `now`: what its hub determines."""
        return RunRecord(
            run=name,
            keys=asdict(keys),
            output_dir=str(self.folder),
            base=str(work.base.folder.absolute()),
            recipe=self.recipe.name,
            recipe_hash=self.recipe.recipe_hash,
            asked_hash=self.asked_hash,
            started=timestamp(),
            base_sha256=work.base.digest,
            data_sha256=work.data_digest,
            licence=asdict(work.base.licence),
            prompt=self.prompt.text if self.prompt else None if self.recipe.objective.invitation else "",
            chats=self.prompt.chat if self.prompt else None,
            **now,
        )

    def door(self) -> machine.ListenAddress:
        """Choose where each local peer listens for others: at the hub's address, any free port."""
        from transport import parse_url

        host = parse_url(self.record.url).host
        return machine.ListenAddress(self.record.bind, 0, f"[{host}]" if ":" in host else host)

    # ---- meanwhile -----------------------------------------------------------------------------------------

    def follow(
        self, hub: Hub, narrator: Narrator, children: LocalPeers, snapshots: SnapshotThread
    ) -> RunEnded:
        """Show the run until it is over; pass on a request to stop, watch local peers, snapshots and loss."""
        from transport.protocol import RoundCommitted, RunEnded

        logging, asked = self.recipe.logging, ("", False)
        watchdog = LossWatchdog(logging.loss_watchdog_threshold)
        for event in hub.events(TICK):
            if (why := self.stop_reason, self.pauses) != asked:
                asked = why, self.pauses
                doing, done = ("pausing", "paused") if self.pauses else ("ending", "stopped")
                self.show(events.Progressed(f"{doing} ({why}): finishing the exchange in flight"))
                hub.stop(reason=f"{done} by its host ({why})", pause=self.pauses)
            for peer in children.newly_ended():
                if not self.stop_reason:
                    self.show(events.Warning(f"{peer.name} {peer.how}"))
            if not self.stop_reason:
                children.check(narrator.present, narrator.met, narrator.rounds)
            self.show_news()
            if event is None:
                continue
            for told in narrator.tell(event):
                self.show(told)
                if isinstance(told, events.Reached):
                    confirmed = f"confirmed by {told.peer}, from {told.where}"
                    machine.save_run(replace(machine.reread_run(self.record), reach=confirmed))
            if isinstance(event, RoundCommitted):
                snapshots.committed(event.round, event.step)
                watchdog.see(event.loss)
            if isinstance(event, RunEnded):
                return event
        hints = ("report it with cocktail.log; `cocktail resume` goes on",)
        raise Failure("unexpected", "the hub ended without saying why", hints=hints)

    # ---- after ---------------------------------------------------------------------------------------------

    def hand_over(self, work: RunDelegate, narrator: Narrator, ended: RunEnded, full: bool) -> None:
        """Write the committed model, unless the disk is full; say how the run ended."""
        from transport.protocol import PAUSED

        state: machine.State = "finished" if ended.finished else "stopped"
        if ended.exit_code == PAUSED and self.stop_reason and not self.pauses:  # the hub was quicker
            ended = replace(ended, exit_code=0, reason=f"stopped by its host ({self.stop_reason})")
        if ended.exit_code:
            state = "paused" if ended.exit_code == PAUSED else "failed"
        try:
            if narrator.rounds and not full and state != "paused":
                self.show(events.Progressed("writing the model"))
                rounds = work.model.write_model(self.folder, progress=self.meter("writing the model"))
                here = partial(ModelOnDisk, self.folder, rounds, narrator.step, self.show)
                model_here(work, here(lambda: bool(self.stop_reason)), self.given)
            self.record_end(state, narrator, ended.reason)
        except Exception as error:
            if not full and not disk_is_full(error):
                raise
            full = True
        if full:
            with suppress(OSError):
                self.record_end("failed", narrator, "the disk is full")
            self.say_how_to_go_on()
            again = f"make room there, then cocktail resume {self.record.run}: what is committed is kept"
            raise out_of_disk(self.folder, (again,))
        if state in ("finished", "stopped") and narrator.rounds:
            work.durable.forget()
            self.wrote_run(work, narrator.rounds)
        if state == "paused":
            self.show(events.RunPaused(self.record.run, narrator.step, self.record.planned, ended.reason))
            self.say_how_to_go_on()
            return
        if ended.exit_code or not narrator.rounds:
            self.say_how_to_go_on()
            at = "" if narrator.rounds else f" before the first of {self.record.planned} steps"
            raise Failure(FAILURES.get(ended.exit_code, "unexpected"), ended.reason + at)
        self.show(
            events.RunFinished(
                run=self.record.run,
                model=shown(self.folder),
                steps=narrator.step,
                eval_loss=narrator.eval_loss if narrator.evaluated == narrator.rounds else None,
                reason=ended.reason,
                planned=self.record.planned,
                prompt=self.record.prompt,
                base_loss=narrator.base_loss,
            )
        )

    def record_end(self, state: machine.State, narrator: Narrator, reason: str) -> None:
        """Write to run.json how the run ended, beside what other commands have written there."""
        record = machine.reread_run(self.record)
        machine.save_run(record.ended(state, narrator.step, narrator.eval_loss, reason))

    def wrote_run(self, work: RunDelegate, rounds: int) -> None:
        """Let extensions add to the folder; the model is on the disk even if this fails."""
        self.show(events.Progressed("completing the run's folder"))
        try:
            work.model.wrote_run(rounds)
        except Exception as error:
            self.show(events.Warning(f"the run's folder is not complete: {explain(error).message}"))

    def say_how_to_go_on(self) -> None:
        """Show the command that resumes the run, on the terminal alone: its URL must not be recorded."""
        record = machine.reread_run(self.record)
        said = f"{record.run} is not finished: cocktail resume {record.run} goes on with it, at {record.url}"
        self.views[0].show(events.Warning(said))


@dataclass
class LossWatchdog:
    """Ends a run whose training loss stays above the recipe's threshold: it has diverged."""

    threshold: float | None  # None: off
    above: int = 0

    def see(self, loss: float | None) -> None:
        """Count a round's loss, unless it is None. Raises Failure (no_result) after PATIENCE bad ones."""
        if loss is None or self.threshold is None:
            return
        self.above = 0 if loss <= self.threshold else self.above + 1
        if self.above >= PATIENCE:
            above = f"above loss_watchdog_threshold {self.threshold:g} for {self.above} rounds"
            before = "the folders in `snapshots` of the run's folder are models of before"
            hints = ("a lower training.learning_rate", before)
            raise Failure("no_result", f"training loss {loss:.4g}, {above}", hints=hints)


def shown(folder: Path) -> str:
    """Return a folder as one would type it from here."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
