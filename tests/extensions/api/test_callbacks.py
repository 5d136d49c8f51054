"""Callbacks are called as transformers calls them, from a run's events."""

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from cocktail_cli.extensions.api import CallbackReader, RunControl, RunState
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.ui import events
from recipes.config import load_recipe


class Told(TrainerCallback):
    """Remembers the calls, as a callback written for transformers would."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append((f"begin {args.learning_rate} {Path(args.output_dir).name}", state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(("step", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.logs.append(logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.calls.append((f"eval {metrics['eval_loss']}", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, event: events.Checkpoint, **kwargs: Any) -> None:
        self.calls.append((f"save {event.model}", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(("end", state.global_step))


@pytest.fixture
def started(tmp_path: Path) -> events.RunStarted:
    recipe = load_recipe("smoke", ["learning_rate=1e-3"])
    (tmp_path / in_folder.RESOLVED).write_text(recipe.to_json())
    return events.RunStarted("amber-otter-42", "url", "smoke", "abc", 9, 20, str(tmp_path), logging_steps=2)


def step(number: int, loss: float | None = 4.0) -> events.Step:
    return events.Step(step=number, steps=20, round=number - 1, loss=loss, peers=2, tokens=100 * number)


def test_a_trainer_callback_is_called_for_each_event_with_the_state_after_it(
    started: events.RunStarted,
) -> None:
    told = Told()
    reader = CallbackReader([told])
    for event in (
        *(started, step(1), step(2), events.Eval(2, 2, 3.5), events.Checkpoint(2, 2, "snapshots/2", 9, 0.1)),
        *(step(2, loss=None), events.RunFinished("amber-otter-42", "out", 2, 3.5, "every sample")),
    ):
        reader.read(event)

    folder = Path(started.output_dir).name
    assert told.calls == [
        *((f"begin 0.001 {folder}", 20), ("step", 1), ("step", 2), ("eval 3.5", 2)),
        *(("save snapshots/2", 2), ("end", 2)),
    ]
    assert [(logs["step"], logs.get("loss"), logs.get("eval_loss")) for logs in told.logs] == [
        *((2, 4.0, None), (2, None, 3.5))
    ]
    assert reader.state.log_history == told.logs
    assert (reader.state.best_metric, reader.state.num_input_tokens_seen) == (3.5, 200)


def test_a_plain_object_or_a_class_may_have_some_of_the_methods(started: events.RunStarted) -> None:
    class Stops:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    reader = CallbackReader([Stops])
    for event in (started, step(1)):
        reader.read(event)
    assert not reader.control.should_training_stop
    reader.read(step(2))

    assert reader.control.should_training_stop


def test_early_stopping_of_transformers_stops_a_run_whose_held_out_loss_rises(
    started: events.RunStarted,
) -> None:
    reader = CallbackReader([EarlyStoppingCallback(early_stopping_patience=2)])
    stopped = []
    for event in (started, *(events.Eval(i, i, loss) for i, loss in enumerate((4.0, 3.0, 3.1, 3.2)))):
        reader.read(event)
        stopped.append(reader.control.should_training_stop)

    assert stopped == [False, False, False, False, True]


def test_state_and_control_have_the_names_of_transformers() -> None:
    assert set(vars(RunControl())) <= set(vars(TrainerControl()))
    assert set(vars(RunState())) <= set(vars(TrainerState()))
