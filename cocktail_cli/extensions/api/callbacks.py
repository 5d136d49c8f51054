"""Callbacks as in `transformers.TrainerCallback`: a reader of a run's events that calls their methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cocktail_cli.assembly import recipe_type
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.ui import events, held_out, step_numbers


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
