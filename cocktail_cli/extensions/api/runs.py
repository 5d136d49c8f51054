"""`launch`, `resume` and `join`: each starts its command in a process of its own, and reads its events.

So an interpreter or a notebook imports no torch, has no signal handler, log or memory setting changed, and
outlives whatever happens to the run. The command's stdin is its life line: a run ends in good order when the
process that started it is gone. Callbacks as in `transformers.TrainerCallback` are called as events are read.
"""

from __future__ import annotations

import difflib
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import IO, Any

import typer

from cocktail_cli.assembly import recipe_type
from cocktail_cli.commands import join as join_command
from cocktail_cli.commands import launch as launch_command
from cocktail_cli.errors import Failure
from cocktail_cli.host import read_events, start_command
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.key_options import REMOVED
from cocktail_cli.options import with_extensions
from cocktail_cli.ui import events, held_out, step_numbers

from .errors import public


@dataclass
class RunState:
    """The fields of `transformers.TrainerState` that a run has, by the same names."""

    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 1
    num_input_tokens_seen: int = 0  # trained tokens
    best_metric: float | None = None  # lowest held-out loss that was read
    best_global_step: int | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)
    epoch: float | None = None  # a run counts samples, not epochs
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None


@dataclass
class RunControl:
    """The fields of `transformers.TrainerControl`; a run heeds `should_training_stop` alone."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class CallbackReader:
    """Calls the methods of callbacks as a run's events come.

    A method is called as transformers calls it, `method(args, state, control, **kwargs)`, where the callback
    has it. `event=` is among the keywords, with all that cocktail knows. `args` has the recipe's keys of
    `training`, `checkpoint` and `logging`, which are those of `TrainingArguments`, and `output_dir`.

    | method | called | keywords |
    |---|---|---|
    | on_train_begin | the hub listens | |
    | on_step_end | a round is committed; it may have several local steps | |
    | on_log | every `logging_steps`, and for each evaluation | logs |
    | on_evaluate | the global model was evaluated | metrics: `eval_loss`, and what an objective adds |
    | on_save | a snapshot is on disk, in `event.model` | |
    | on_train_end | the model is on disk, or the run is paused | |

    Args:
        callbacks: objects, or classes to make one of without arguments.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self.callbacks = [one() if isinstance(one, type) else one for one in callbacks]
        self.args = SimpleNamespace()
        self.state, self.control = RunState(), RunControl()
        self.logged = 0  # step of the newest log
        self.here = Path.cwd()  # the folders in events are relative to it

    def read(self, event: events.Event) -> None:
        """Call what this event is for. Raises what a callback raises."""
        for method, more in self._calls(event):
            for callback in self.callbacks:
                if (called := getattr(callback, method, None)) is not None:
                    changed = called(self.args, self.state, self.control, event=event, **more)
                    self.control = self.control if changed is None else changed

    def _calls(self, event: events.Event) -> Iterator[tuple[str, dict[str, Any]]]:
        """Update the state, and yield each method to call with its keywords."""
        if isinstance(event, events.RunStarted):
            self.args = run_arguments(event, self.here / event.output_dir)
            self.state.max_steps, self.state.logging_steps = event.steps, event.logging_steps
            yield "on_train_begin", {}
        elif isinstance(event, events.Step) and event.loss is not None:
            self.state.global_step, self.state.num_input_tokens_seen = event.step, event.tokens
            yield "on_step_end", {}
            if event.step // self.state.logging_steps > self.logged // self.state.logging_steps:
                self.logged = event.step
                yield self._log({**step_numbers(event), "learning_rate": event.lr})
        elif isinstance(event, events.Eval):
            metrics = {"eval_loss": event.loss, **held_out(event.extra)}
            yield self._log({**metrics, "step": event.step})
            yield "on_evaluate", {"metrics": metrics}
            if self.state.best_metric is None or event.loss < self.state.best_metric:
                self.state.best_metric, self.state.best_global_step = event.loss, event.step
        elif isinstance(event, events.Checkpoint):
            yield "on_save", {}
        elif isinstance(event, (events.RunFinished, events.RunPaused)):
            yield "on_train_end", {}

    def _log(self, logs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.state.log_history.append(logs)
        return "on_log", {"logs": logs}


def run_arguments(event: events.RunStarted, folder: Path) -> SimpleNamespace:
    """Return the recipe's keys by their bare names, and keys of TrainingArguments that follow from them."""
    from recipes.config import recipe_from_json

    recipe = recipe_from_json((folder / in_folder.RESOLVED).read_text(encoding="utf-8"), recipe_type)
    sections = (recipe.training, recipe.checkpoint, recipe.logging, *recipe.extensions.values())
    keys = {key: value for section in sections for key, value in section}
    named = {
        "output_dir": str(folder),
        "run_name": event.run,
        "max_steps": event.steps,
        "eval_strategy": "steps" if recipe.has_eval else "no",
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "load_best_model_at_end": False,
    }
    return SimpleNamespace(**(keys | named))


TICK = 0.2  # seconds: on Windows a wait without end cannot be interrupted
TERMINAL = {  # options about the terminal that a command runs in
    *("as_json", "quiet", "verbose", "no_color", "progress", "detach", "detached"),
    *("life_line", "yes"),
}
BEGINNINGS = (events.RunStarted, events.Joined)
ENDINGS = (events.RunFinished, events.RunPaused, events.Left)

Path_ = str | PathLike[str]


class Feed:
    """The events of a command's process, read by a thread so that a slow reader does not hold up the run."""

    def __init__(self, process: subprocess.Popen[str], stderr: IO[str]) -> None:
        self.process, self.stderr = process, stderr
        self.events: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()  # None: the end
        self.begun = threading.Event()  # or ended
        self.beginning: events.RunStarted | events.Joined | None = None
        self.ending: events.RunFinished | events.RunPaused | events.Left | None = None
        self.failure: Failure | None = None
        self.stop_asked = False
        self._writing = threading.Lock()  # a stop may be asked for while the process ends by itself
        threading.Thread(target=self._read, name="events of a run", daemon=True).start()

    def write(self, text: str) -> None:
        """Write a line to the process's stdin, unless it has ended: its events say why."""
        stdin = self.process.stdin
        with self._writing, suppress(OSError):
            if stdin and not stdin.closed:
                stdin.write(text)
                stdin.flush()

    def close_stdin(self) -> None:
        """Close the process's stdin. Words that an ended process left unread cannot be flushed any more."""
        with self._writing, suppress(OSError):
            if self.process.stdin:
                self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.stderr, self.process.stdout:
            try:
                for event in read_events(self.process):
                    self._note(event)
                    self.events.put(event)
            except Failure as failure:
                self.failure = failure
            status = self.process.wait()
            self.close_stdin()
            if self.ending is None and self.failure is None and not self.stop_asked:
                self.failure = self._crash(status)
        self.begun.set()
        self.events.put(None)

    def _note(self, event: events.Event) -> None:
        if isinstance(event, BEGINNINGS):
            self.beginning = event
            self.begun.set()
        elif isinstance(event, ENDINGS):
            self.ending = event

    def _crash(self, status: int) -> Failure:
        self.stderr.seek(0)
        last = self.stderr.read().strip().splitlines()[-1:]
        hints = tuple(f"its last words: {line[:300]}" for line in last)
        return Failure("unexpected", f"the run's process ended with exit {status}", hints=hints)


class Run:
    """A run that this program hosts, or takes part in. Iterating yields its events.

    The events are those of `--json`, as the dataclasses of `cocktail_cli.events`. A run goes on whether or
    not its events are read, and stops when its object is dropped: keep it, iterate over it, or use `with`.

        with cocktail_cli.launch(model="m", data="d.jsonl", learning_rate=1e-4) as run:
            print(run.url)
            for event in run:
                if isinstance(event, events.Eval) and event.loss < 2:
                    run.stop()
        print(run.model_dir)

    Raises:
        Failure: while iterating, and from every method that waits; a subclass for each exit status.
    """

    def __init__(self, arguments: list[str], callbacks: Iterable[Any] = (), url: str = "") -> None:
        self._callbacks, self._url, self._over = CallbackReader(callbacks), url, False
        self._here = Path.cwd()
        stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        self._process = start_command(arguments, **pipes)
        self._feed = Feed(self._process, stderr)
        if url:
            self._feed.write(url + "\n")

    # ---- reading -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[events.Event]:
        return self

    def __next__(self) -> events.Event:
        if self._over:
            raise StopIteration
        try:
            event = self._next()
            if event is not None:
                self._callbacks.read(event)
        except BaseException:  # Ctrl-C, or an error of a callback
            self._end()
            raise
        if event is None:
            self._raise_failure()
            raise StopIteration
        if self._callbacks.control.should_training_stop:
            self.stop()
        return event

    def _next(self) -> events.Event | None:
        """Wait for the next event; None at the end."""
        while True:
            with suppress(queue.Empty):
                event = self._feed.events.get(timeout=TICK)
                self._over = event is None
                return event

    def _raise_failure(self) -> None:
        if self._feed.failure is not None:
            raise public(self._feed.failure)

    def _no_result(self) -> Failure:
        began = self._feed.beginning
        hints = (f'cocktail_cli.resume("{began.run}")',) if isinstance(began, events.RunStarted) else ()
        return public(Failure("no_result", "the run was stopped before it had a result", hints=hints))

    @property
    def url(self) -> str:
        """The run URL to pass on. Waits until the hub listens."""
        beginning = self._begun()
        return self._url or (beginning.url if isinstance(beginning, events.RunStarted) else "")

    @property
    def name(self) -> str:
        """The name of the run, such as `amber-otter-42`. Waits until it has begun."""
        return self._begun().run

    def _begun(self) -> events.RunStarted | events.Joined:
        try:
            while not self._feed.begun.wait(TICK):
                pass
        except BaseException:
            self._end()
            raise
        self._raise_failure()
        if self._feed.beginning is None:
            raise self._no_result()
        return self._feed.beginning

    def result(self) -> events.RunFinished | events.RunPaused | events.Left:
        """Wait for the end, with the callbacks called meanwhile; return the last event."""
        for _ in self:
            pass
        self._raise_failure()
        if self._feed.ending is None:
            raise self._no_result()
        return self._feed.ending

    @property
    def model_dir(self) -> Path:
        """The folder of the model, for `from_pretrained`. Waits for the end of a launched run."""
        result = self.result()
        if isinstance(result, events.RunFinished):
            return self._here / result.model
        hints = ("resume=True goes on with a paused run; of a joined run its host has the model",)
        said = "this run has written no model here: it is paused, or was joined"
        raise public(Failure("no_result", said, hints=hints))

    # ---- ending --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask to end in good order, as Ctrl-C does for the command; the last events follow."""
        if self._feed.stop_asked:
            return
        self._feed.stop_asked = True
        self._feed.write("stopped from Python\n")
        self._feed.close_stdin()

    def kill(self) -> None:
        """End the process at once. Committed rounds are on the disk; `resume` continues them."""
        self._feed.stop_asked = True
        self._process.kill()

    def _end(self) -> None:
        """Stop and wait for the end, without callbacks; a second Ctrl-C kills."""
        self.stop()
        try:
            while not self._over:
                self._next()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop a run that is still going on, and wait for its end; having no result yet is then no error."""
        if self._over:
            return
        self._end()
        if kind is None and self._feed.failure is not None and self._feed.failure.code != "no_result":
            self._raise_failure()

    def __del__(self) -> None:
        if hasattr(self, "_feed") and not self._over:
            self.stop()


def launch(
    recipe: Path_ | None = None,
    *,
    model: Path_ | None = None,
    data: Path_ | None = None,
    peers: int = 1,
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Run:
    """Host a run, as `cocktail launch` does, with `peers` peers on this machine.

        for event in cocktail_cli.launch(model="./my-model", data="my.jsonl", peers=2, learning_rate=1e-4):
            if isinstance(event, cocktail_cli.events.Step):
                print(event.step, event.loss)

    Args:
        recipe: name of a shipped recipe, path, or https address; None: chosen by model and data.
        model: folder or hub id, in place of the recipe's.
        data: file, folder or hub id, in place of the recipe's data.
        callbacks: `transformers.TrainerCallback`s, or objects with some of their methods; see CallbackReader.
        options: options of the command with underscores (`output_dir="out"`, `port=0`, `max_up="5mbit"`), and
            keys of the recipe (`learning_rate=1e-4`, `lora={"lora_r": 8}`, `**{"datasets.0.split": "test"}`).

    Raises:
        Failure: here, if an argument is none of these; all other errors when the run is read.
    """
    known = options_of(launch_command.launch)
    given = {"model": model, "data": data, "peers": peers, **options}
    chosen = {
        name: value
        for name, value in given.items()
        if name in known or name in TERMINAL or in_place_of("launch", name)
    }
    keys = [f"{name}={as_yaml_value(name, value)}" for name, value in given.items() if name not in chosen]
    positional = [*([] if recipe is None else [text_of("recipe", recipe)]), *keys]
    words = command_words("launch", known, chosen)
    return Run(["launch", "--json", "--life-line", *words, "--", *positional], callbacks)


def resume(run: Path_, callbacks: Iterable[Any] = (), **options: Any) -> Run:
    """Continue a run that was paused or killed, as `cocktail resume` does.

    Args:
        run: its name, or its output folder.
        callbacks: as for `launch`; their state begins anew.
        options: options of the command with underscores, such as `peers=2`.

    Raises:
        Failure: here, if an argument is none of these; all other errors when the run is read.
    """
    words = command_words("resume", options_of(launch_command.resume), options)
    return Run(["resume", "--json", "--life-line", *words, "--", text_of("run", run)], callbacks)


def join(run_url: str, **options: Any) -> Run:
    """Lend this machine to a run, as `cocktail join --yes` does: calling it is the consent.

        run = cocktail_cli.join("cocktail://...", max_up="5mbit", until="08:00")
        print(run.result().reason)

    Args:
        run_url: the line that the run's host passed on.
        options: options of the command with underscores: `name="attic"`, `hours="22:00-07:00"`.

    Raises:
        Failure: here, if an argument is none of these; all other errors when the run is read.
    """
    words = command_words("join", options_of(join_command.join), options)
    return Run(["join", "-", "--life-line", "--yes", "--json", *words], url=text_of("run_url", run_url))


# ---- arguments as words of the command ---------------------------------------------------------------------


@cache
def options_of(command: Callable[..., None]) -> dict[str, str]:
    """Return name -> option of a command: `output_dir` -> `--output-dir`."""
    app = typer.Typer()
    app.command()(with_extensions(command))
    parameters = typer.main.get_command(app).params
    return {
        parameter.name: parameter.opts[0]
        for parameter in parameters
        if parameter.param_type_name == "option" and parameter.name and parameter.name not in TERMINAL
    }


def command_words(command: str, known: dict[str, str], given: dict[str, Any]) -> list[str]:
    """Write options as the command line has them; None and False are the default.

    Errors: InvalidInput for a name that is no option.
    """
    words = []
    for name, value in given.items():
        if name in TERMINAL:
            said = f"`{name}` is for the terminal: {command} returns what it shows"
            raise public(Failure("usage", said, hints=("leave it out, and iterate over the run",)))
        if now := in_place_of(command, name):
            raise public(Failure("usage", f"{command} has no option `{name}`", hints=(f"now it is {now}",)))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hints = (f"did you mean `{near[0]}`?",) if near else (f"its options: {', '.join(sorted(known))}",)
            raise public(Failure("usage", f"{command} has no option `{name}`", hints=hints))
        if value is True:
            words.append(known[name])
        elif value is not None and value is not False:
            words += [known[name], text_of(name, value)]
    return words


def in_place_of(command: str, name: str) -> str:
    """Return what does the work of an option that is gone; empty: it is not gone."""
    return REMOVED.get(f"{command} --{name.replace('_', '-')}", "")


def text_of(name: str, value: Any) -> str:
    """Write the value of an option. Raises InvalidInput for an object in memory, such as a data set."""
    if isinstance(value, (str, int, float, PathLike)):
        return str(value)
    kind = type(value).__name__
    hints = ("a data set: data.to_json('rows.jsonl'), then data='rows.jsonl'",) if name == "data" else ()
    raise public(Failure("usage", f"{name} is a {kind}; a run takes a path or a name", hints=hints))


def as_yaml_value(name: str, value: Any) -> str:
    """Write the value of a recipe's key as JSON, which YAML contains."""
    try:
        return json.dumps(value, ensure_ascii=False, default=os.fspath)
    except (TypeError, ValueError):  # as of bytes
        kind = type(value).__name__
        hints = ("give a number, a text, a list or a dict",)
        raise public(
            Failure("usage", f"{name} is a {kind}, which a recipe cannot hold", hints=hints)
        ) from None
