"""One launch from the recipe to the model on disk: prepare, open the hub, follow it, hand over."""

from __future__ import annotations

import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure, Interrupted, disk_is_full, explain, out_of_disk
from cocktail_cli.machine import Doorstep, RunRecord, State, new_name, newest, own_keys, reach_of, save
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import (
    Event,
    Progressed,
    ProgressMeter,
    Reached,
    RunFinished,
    RunPaused,
    RunStarted,
    View,
    Warning,
    poll_status,
    timestamp,
)

from . import run_folder as in_folder
from .local_peers import LEAVE_WITHIN, Ended, LocalPeers, LocalSettings
from .resume_run import check_corpus, same_base
from .watchdog import Watchdog

if TYPE_CHECKING:
    from cocktail_cli.commands.run.dashboard import Page
    from recipes.config import Recipe as Resolved
    from recipes.downloads import Repository
    from transport import Hub, RunKeys
    from transport.protocol import Event as HubEvent
    from transport.protocol import RunEnded

    from .hub_delegate import RunWork
    from .narrator import Narrator
    from .snapshot_thread import Snapshots

BIND, PORT = "0.0.0.0", 29400
LOOK_WITHIN = 5.0  # seconds for the hub to say how its peers are
TICK = 0.2  # seconds between two looks at the local peers and the wish to stop
HUB_ENDS_WITHIN = 15.0  # seconds for the hub to serve what is still fetched, and close
STOPS_WITHIN = 24.0  # seconds from the wish to stop until hub and local peers are gone
CODES = {0: "no_result", 7: "no_result", 8: "out_of_memory"}  # how a run ended -> code of the failure
AGAIN = "make room there, then the same command with --resume: nothing that was committed is lost"


@dataclass(frozen=True)
class Listen:
    """Where the hub listens, and under which address it is made known."""

    bind: str = BIND
    port: int = PORT  # 0: any free one
    advertise: str | None = None


class Run:
    """One launch, from the recipe to the model on disk.

    Args:
        folder: the run's output folder, claimed.
        views: whoever is told the events.
        resumed: the record of the run that goes on; None: a new one.
        page: of the run, started with it if it is wanted.
    """

    def __init__(
        self,
        recipe: Resolved,
        folder: Path,
        views: list[View],
        resumed: RunRecord | None = None,
        page: Page | None = None,
    ) -> None:
        self.recipe, self.folder, self.views, self.resumed = recipe, folder, views, resumed
        self.asked_hash = recipe.recipe_hash  # before what is on the hub is named by commit
        self.page = page
        self.stop_asked = ""
        self.stop_by = float("inf")  # on the monotonic clock

    def tell(self, event: Event) -> None:
        for view in self.views:
            view.show(event)

    def ask_stop(self, why: str) -> None:
        self.stop_asked, self.stop_by = why, time.monotonic() + STOPS_WITHIN

    def within(self, seconds: float) -> float:
        """At most `seconds`, and less where the run is to have stopped by then."""
        return max(0.0, min(seconds, self.stop_by - time.monotonic()))

    def carry_out(self, listen: Listen, local: LocalSettings, peers: int) -> None:
        from .narrator import Narrator

        work = self.prepare()
        narrator = Narrator(work.parameters, self.recipe.compression.local_steps)
        # Until here there is nothing to end in good order: a Ctrl-C is the usual KeyboardInterrupt.
        with leave_on_signal(self.ask_stop):
            hub, record = self.open(work, narrator, listen, peers)
            door = self.door(record) if self.recipe.swarm.owners == "peers" else None
            children = LocalPeers(self.folder, replace(local, door=door))
            snapshots = self.snapshots(work, hub)
            try:
                snapshots.start()
                children.start(record.local_url(), peers)
                ended = self.follow(hub, narrator, children, snapshots)
                children.finish(self.within(5.0))
            except BaseException as error:
                at_once = isinstance(error, Interrupted)
                hub.stop(now=True, reason="stopped by its host" if at_once else explain(error).message)
                self.stop_by = time.monotonic() if at_once else self.stop_by
                with suppress(OSError):  # of a full disk, perhaps the error itself
                    save(newest(record).ended("failed", narrator.step, narrator.eval_loss))
                self.say_how_to_go_on(record)
                raise
            finally:
                snapshots.close()
                children.stop(self.within(LEAVE_WITHIN))
                if hub.join(self.within(HUB_ENDS_WITHIN)):
                    hub.ledger.close()
                    work.close()
            full = hub.error is not None and disk_is_full(hub.error)
            self.hand_over(work, record, narrator, ended, full)

    # ---- before --------------------------------------------------------------------------------------------

    def prepare(self) -> RunWork:
        """The base model and the corpus, on this disk; the recipe in full beside them."""
        self.tell(Progressed("starting"))  # what is imported here takes seconds
        from cocktail_cli.commands.tools.recipes import as_yaml
        from recipes.config import is_hub_id
        from recipes.data import build_corpus, count_lines, prefetch_dataset, read_rows
        from recipes.models import check_fit, load_tokenizer, open_tokenizer, pin_revisions, prepare_base

        from .hub_delegate import RunWork

        old, kept = self.resumed, self.folder / in_folder.TOKENIZER
        code = self.recipe.model.trust_remote_code
        if (repository := self.repository) is not None:
            repository.open()  # before hours of training: a token that may not write is found out now
        for dataset in (*self.recipe.datasets, *self.recipe.eval_datasets):
            # a file that is not there is found out before a model is fetched
            read_rows(dataset, progress=ProgressMeter(self.tell, f"fetching {dataset.path}", "bytes"))
        self.tell(Progressed("preparing the base model"))
        if old is None:
            fetched = ProgressMeter(self.tell, f"fetching {self.recipe.model.model_name_or_path}", "bytes")
            base = prepare_base(self.recipe, self.folder / in_folder.BASE, fetched)
            self.recipe = pin_revisions(self.recipe, base.folder)
            if (commit := self.recipe.model.model_revision) is not None:
                model = self.recipe.model.model_name_or_path
                self.tell(Progressed(f"{model}: commit {commit}, for this run and all its peers"))
            text = self.recipe.to_json()
            (self.folder / in_folder.RESOLVED).write_text(text, encoding="utf-8")
            (self.folder / in_folder.RECIPE).write_text(as_yaml(text), encoding="utf-8")
            tokenizer = load_tokenizer(self.recipe.model, base.folder)
        else:
            base = same_base(old, self.recipe)
            tokenizer = open_tokenizer(kept, self.recipe.model.pad_token, code)
        check_fit(self.recipe, base.folder, tokenizer)
        self.tell(Progressed("reading the data"))
        meters: dict[str, ProgressMeter] = {}

        def tokenized(path: str, rows: int) -> None:
            if path not in meters:
                meters[path] = ProgressMeter(self.tell, f"tokenizing {path}", "rows")
            meters[path](rows, counts.get(path) or 0)

        counts = {dataset.path: count_lines(dataset) for dataset in self.recipe.datasets}
        if not self.recipe.data.streaming:  # else of data on the hub only what is read is fetched
            for dataset in (*self.recipe.datasets, *self.recipe.eval_datasets):
                if is_hub_id(dataset.path):
                    fetching = ProgressMeter(self.tell, f"fetching {dataset.path}", "bytes")
                    counts[dataset.path] = prefetch_dataset(dataset, fetching)
        corpus = build_corpus(self.recipe, tokenizer, self.folder / in_folder.STREAM, tokenized)
        if old is None:
            tokenizer.save_pretrained(kept)
        else:
            check_corpus(old, self.recipe, corpus)
        for line in corpus.found:
            self.tell(Progressed(f"data: {line}"))
        for warning in corpus.warnings:
            self.tell(Warning(warning))
        return RunWork(self.recipe, base, corpus, self.folder / in_folder.LEDGER)

    def open(self, work: RunWork, narrator: Narrator, listen: Listen, peers: int) -> tuple[Hub, RunRecord]:
        """The hub, listening, and the record by which other commands find it."""
        from recipes.models import package_versions
        from transport import Hub, Ledger, RunKeys, ask_status, parse_url
        from transport.hub import keep_freed_memory

        from .hub_delegate import settings_of

        old = self.resumed
        keys, name = (RunKeys(**old.keys), old.run) if old else (RunKeys.generate(), new_name())
        settings = settings_of(work, name, peers, own_keys().public)
        ledger = Ledger(self.folder / in_folder.LEDGER, run=name, samples=settings.samples)
        work.recover(ledger)
        narrator.recall(ledger)
        keep_freed_memory()
        hub = Hub((listen.bind, listen.port), keys, ledger, settings, work)
        work.tell = hub.warn
        hub.start()
        reach = reach_of(listen.bind, hub.port, listen.advertise)
        url = str(keys.url(reach.host, reach.port, name))
        if old and not listen.advertise:
            url = old.url  # as volunteers have it, whatever this machine is called today
        recorded = self.recorded(work, url, hub.port, listen.bind, keys, name, reach.known)
        self.record = record = replace(recorded, planned=settings.steps)
        save(record)
        self.tell(
            RunStarted(
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
            )
        )
        poll_status(self.views[0], partial(ask_status, parse_url(record.local_url()), LOOK_WITHIN))
        if self.page is not None:
            self.page.start(self.folder)
        return hub, record

    def recorded(
        self, work: RunWork, url: str, port: int, bind: str, keys: RunKeys, name: str, reach: str
    ) -> RunRecord:
        """What this machine must remember of the run; of one that is resumed only what is new."""
        if self.resumed:
            return replace(self.resumed, url=url, pid=os.getpid(), state="running")
        return RunRecord(
            run=name,
            url=url,
            keys=asdict(keys),
            pid=os.getpid(),
            port=port,
            bind=bind,
            output_dir=str(self.folder),
            base=str(work.base.folder.absolute()),
            recipe=self.recipe.name,
            recipe_hash=self.recipe.recipe_hash,
            asked_hash=self.asked_hash,
            started=timestamp(),
            reach=reach,
            base_sha256=work.base.digest,
            data_sha256=work.corpus.digest(),
        )

    @staticmethod
    def door(record: RunRecord) -> Doorstep:
        """Where each local peer is reached by the others: where the hub is, at any free port."""
        from transport import parse_url

        host = parse_url(record.url).host
        return Doorstep(record.bind, 0, f"[{host}]" if ":" in host else host)

    def snapshots(self, work: RunWork, hub: Hub) -> Snapshots:
        from .snapshot_thread import Snapshots

        steps = hub.settings.steps
        return Snapshots(work.place, self.recipe.checkpoint.save_every(steps), steps, hub.offer)

    @property
    def repository(self) -> Repository | None:
        """Where the model is pushed, if the recipe says so."""
        from recipes.downloads import Repository

        checkpoint = self.recipe.checkpoint
        if not checkpoint.push_to_hub:
            return None
        return Repository(checkpoint.hub_model_id or "", checkpoint.hub_private_repo)

    def push(self, record: RunRecord, rounds: int) -> None:
        """The model, which is on the disk whatever becomes of this."""
        if (repository := self.repository) is None:
            return
        self.tell(Progressed(f"pushing the model to {repository.name}"))
        try:
            address = repository.push(self.folder, f"{record.run}, {rounds} rounds")
        except Exception as error:
            again = f"cocktail export {record.run} -o DIR --push {repository.name}"
            self.tell(Warning(f"the model is not pushed: {explain(error).message}; again: {again}"))
        else:
            self.tell(Progressed(f"pushed: {address}"))

    # ---- meanwhile -----------------------------------------------------------------------------------------

    def follow(self, hub: Hub, narrator: Narrator, children: LocalPeers, snapshots: Snapshots) -> RunEnded:
        """Show the run until it is over; pass on a wish to stop, mind the local peers and the snapshots."""
        from transport.protocol import RoundCommitted, RunEnded

        feed, watchdog = Feed(hub.events()), Watchdog.of(self.recipe.logging)
        asked = False
        while True:
            if self.stop_asked and not asked:
                asked = True
                self.tell(Progressed(f"stopping ({self.stop_asked}): finishing the exchange in flight"))
                hub.stop(now=False)
            for ended in children.newly_ended():
                self.mourn(ended, children, narrator)
            for news in (*snapshots.events(), *(self.page.news() if self.page else ())):
                self.tell(news)
            event = feed.next(TICK)
            if event is None:
                if feed.dry:
                    raise Failure("unexpected", "the hub ended without saying why")
                continue
            for said in narrator.tell(event):
                self.tell(said)
                if isinstance(said, Reached):
                    confirmed = f"confirmed by {said.peer}, from {said.where}"
                    save(replace(newest(self.record), reach=confirmed))
            if isinstance(event, RoundCommitted):
                snapshots.committed(event.round, event.step)
                watchdog.see(event.loss)
            if isinstance(event, RunEnded):
                return event

    def mourn(self, ended: Ended, children: LocalPeers, narrator: Narrator) -> None:
        """A local peer's process is gone while the run goes on; where it was the only hope, give up."""
        if self.stop_asked:
            return
        said = f": {ended.said}" if ended.said else ""
        self.tell(Warning(f"{ended.name} ended with exit {ended.exit}{said}"))
        if not children.any_left and not narrator.present and narrator.rounds == 0:
            raise Failure("no_result", f"every local peer failed before the first step; {ended.name}{said}")

    # ---- after ---------------------------------------------------------------------------------------------

    def hand_over(
        self, work: RunWork, record: RunRecord, narrator: Narrator, ended: RunEnded, full: bool
    ) -> None:
        """Write what is committed as a model, unless the disk is full; say how the run ended."""
        from transport.protocol import PAUSED

        state: State = "finished" if ended.exit_code == 0 and narrator.rounds else "failed"
        state = "paused" if ended.exit_code == PAUSED else state
        try:
            if narrator.rounds and not full and state != "paused":
                self.tell(Progressed("writing the model"))
                rounds = work.place.write_model(
                    self.folder, told=ProgressMeter(self.tell, "writing the model", "bytes")
                )
                self.push(record, rounds)
            save(newest(record).ended(state, narrator.step, narrator.eval_loss))
        except Exception as error:
            if not full and not disk_is_full(error):
                raise
            full = True
        if full:
            with suppress(OSError):
                save(newest(record).ended("failed", narrator.step, narrator.eval_loss))
            self.say_how_to_go_on(record)
            raise out_of_disk(self.folder, (AGAIN,))
        if state == "finished":
            work.owner.forget()
        if state == "paused":
            self.tell(RunPaused(record.run, narrator.step, record.planned, ended.reason))
            self.say_how_to_go_on(record)
            return
        if ended.exit_code or not narrator.rounds:
            self.say_how_to_go_on(record)
            raise Failure(CODES.get(ended.exit_code, "unexpected"), ended.reason)
        self.tell(
            RunFinished(
                run=record.run,
                model=shown(self.folder),
                steps=narrator.step,
                eval_loss=narrator.eval_loss,
                reason=ended.reason,
                planned=record.planned,
            )
        )

    def say_how_to_go_on(self, record: RunRecord) -> None:
        """The command that resumes the run, and its URL again. Not for the diary: the URL lets in."""
        again = resuming(sys.argv, shown(self.folder))
        said = f"{record.run} is not finished: {again} goes on with it, at {newest(record).url}"
        for view in self.views[:1]:
            view.show(Warning(said))


class Feed:
    """An iterator that blocks, read from a thread of its own, so that its user can wait for a moment only."""

    def __init__(self, events: Iterator[HubEvent]) -> None:
        self.waiting: queue.SimpleQueue[HubEvent] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.pump, args=(events,), name="hub events", daemon=True)
        self.thread.start()

    def pump(self, events: Iterator[HubEvent]) -> None:
        for event in events:
            self.waiting.put(event)

    @property
    def dry(self) -> bool:
        """Nothing is left and nothing will come."""
        return not self.thread.is_alive() and self.waiting.empty()

    def next(self, timeout: float) -> HubEvent | None:
        """The next event; None where none came within `timeout` seconds."""
        try:
            return self.waiting.get(timeout=timeout)
        except queue.Empty:
            return None


def resuming(arguments: list[str], folder: str) -> str:
    """The command line of a launch, with --resume. `folder`: where its run is."""
    command, *rest = arguments[1:] or ["launch"]
    rest = settled([one for one in rest if one != "--resume"], folder)
    return shlex.join(["cocktail", command, "--resume", *rest])


def settled(arguments: list[str], folder: str) -> list[str]:
    """The words of a launch, which names the folder that --fresh has found for it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [one for one in arguments[:end] if one != "--fresh"]
    return [*options, *(["-o", folder] if len(options) < end else []), *arguments[end:]]


def shown(folder: Path) -> str:
    """A folder as one would type it from here."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:  # it lies elsewhere
        return str(folder)
