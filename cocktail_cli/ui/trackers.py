"""Experiment trackers: TensorBoard, Weights & Biases, Trackio (`logging.report_to`).

Only the host reports, and only what the recipe asks for. A tracker that fails is reported once and dropped:
the run goes on, and metrics.jsonl has all numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.errors import Failure
from cocktail_cli.installation import command_to_add

from .events import RunStarted

if TYPE_CHECKING:
    from recipes.config import Recipe

    from .metrics_lines import Line

FOLDER = "tracking"  # the trackers' files, in the run's folder
GROUPS = {  # groups of curves
    "train": ("loss", "tokens", "tokens_per_s", "samples", "lr", "grad_norm"),
    "eval": ("eval_loss",),
    "time": ("step_s", "compute_s", "wait_s", "sync_s"),
    "swarm": ("peers", "late", "up_bytes", "down_bytes", "ratio_fp16", "packet_bytes"),
}


def metric_names(line: Line) -> dict[str, float]:
    """Rename a line's numbers as trackers expect them: train/loss, eval/loss, time/step_s, ..."""
    found, figures = {}, [name for name in line if "/" in name]  # of the objective
    for group, names in GROUPS.items():
        for name in (*names, *(figures if group in ("train", "eval") else ())):
            if line.get(name) is not None and (group == "eval") == (line["kind"] == "eval"):
                found[f"{group}/{name.removeprefix('eval_')}"] = float(line[name])
    return found


class Tracker:
    """A tracker, opened when the run starts. One that fails is reported once and called no more.

    Args:
        told: receives the failure.
    """

    def __init__(self, name: str, recipe: Recipe, folder: Path, told: Callable[[str], None]) -> None:
        self.name, self.recipe, self.folder, self.told = name, recipe, folder / FOLDER, told
        self.run: Any = None  # of the tracking library

    def start(self, event: RunStarted) -> None:
        with self.tolerated():
            self.run = self.tensorboard() if self.name == "tensorboard" else self.hosted(event)

    def tensorboard(self) -> Any:
        """Write scalars into the run's folder: `tensorboard --logdir outputs/NAME/tracking`."""
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(self.folder))

    def hosted(self, event: RunStarted) -> Any:
        """Log to wandb or trackio, which share an interface. A resumed run continues under its name."""
        self.folder.mkdir(exist_ok=True)
        return import_module(self.name).init(
            project=self.recipe.logging.project,
            name=event.run,
            config=self.recipe.model_dump(mode="json") | {"recipe_hash": self.recipe.recipe_hash},
            resume="allow",
            **({"id": event.run, "dir": str(self.folder)} if self.name == "wandb" else {}),
        )

    def log(self, line: Line) -> None:
        if self.run is None or not (numbers := metric_names(line)):
            return
        step = line["step"]
        with self.tolerated():
            if self.name == "tensorboard":
                for name, value in numbers.items():
                    self.run.add_scalar(name, value, step)
                self.run.flush()
            elif self.name == "trackio":  # `step` is a reserved name there
                self.run.log(numbers | {"round": line["round"]}, step=step)
            else:  # by `step=` wandb drops what a resumed run repeats
                self.run.log(numbers | {"round": line["round"], "step": step})

    def close(self) -> None:
        if self.run is not None:
            with self.tolerated():
                self.run.close() if self.name == "tensorboard" else self.run.finish()

    @contextmanager
    def tolerated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no failure of a tracking library may end the run
            self.run = None
            said = " ".join(str(error).split())[:300]
            self.told(f"{self.name} does not take the run's numbers ({said}): metrics.jsonl has them")


def trackers_of(recipe: Recipe, folder: Path, told: Callable[[str], None]) -> Sequence[Tracker]:
    """Build the trackers that the recipe names.

    Raises:
        Failure: (preflight) a package is not installed.
    """
    for name in recipe.logging.report_to:
        if find_spec(name) is None:
            hints = (command_to_add(name), "or logging.report_to=none")
            raise Failure("preflight", f"logging.report_to: {name} is not installed", hints=hints)
    return [Tracker(name, recipe, folder, told) for name in recipe.logging.report_to]
