"""Experiment trackers: TensorBoard, Weights & Biases, Trackio (`logging.report_to`).

Only the host reports, and only what the recipe asks for. A tracker that fails is reported once and dropped:
the run goes on, and metrics.jsonl has all numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cocktail_cli.errors import Failure
from cocktail_cli.installation import command_to_add

from .events import RunStarted
from .metrics_lines import REWARDS

if TYPE_CHECKING:
    from recipes.config import Recipe

    from .metrics_lines import Line

FOLDER = "tracking"  # the trackers' files, in the run's folder
GROUPS = {  # groups of curves
    "train": ("loss", "tokens", "tokens_per_s", "samples", "lr", "grad_norm", *REWARDS),
    "eval": ("eval_loss", *(f"eval_{name}" for name in REWARDS)),
    "time": ("step_s", "compute_s", "wait_s", "sync_s"),
    "swarm": ("peers", "late", "up_bytes", "down_bytes", "ratio_fp16", "packet_bytes"),
}


class Tracker(Protocol):
    def start(self, event: RunStarted) -> None: ...
    def log(self, line: Line) -> None: ...
    def close(self) -> None: ...


def metric_names(line: Line) -> dict[str, float]:
    """Rename a line's numbers as trackers expect them: train/loss, eval/loss, time/step_s, ..."""
    found = {}
    for group, names in GROUPS.items():
        for name in names:
            if line.get(name) is not None and (group == "eval") == (line["kind"] == "eval"):
                found[f"{group}/{name.removeprefix('eval_')}"] = float(line[name])
    return found


class Tensorboard:
    """Write scalars into the run's folder: `tensorboard --logdir outputs/NAME/tracking`."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.writer: Any = None

    def start(self, event: RunStarted) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(self.folder))

    def log(self, line: Line) -> None:
        for name, value in metric_names(line).items():
            self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Hosted:
    """Log to wandb or trackio, which share an interface. A resumed run continues under its name."""

    def __init__(self, module: str, recipe: Recipe, folder: Path) -> None:
        self.module, self.recipe, self.folder = module, recipe, folder / FOLDER
        self.run: Any = None

    def start(self, event: RunStarted) -> None:
        from importlib import import_module

        self.folder.mkdir(exist_ok=True)
        self.run = import_module(self.module).init(
            project=self.recipe.logging.project,
            name=event.run,
            config=self.recipe.model_dump(mode="json") | {"recipe_hash": self.recipe.recipe_hash},
            resume="allow",
            **({"id": event.run, "dir": str(self.folder)} if self.module == "wandb" else {}),
        )

    def log(self, line: Line) -> None:
        if not (numbers := metric_names(line)):
            return
        numbers["round"] = line["round"]
        if self.module == "trackio":  # `step` is a reserved name there
            self.run.log(numbers, step=line["step"])
        else:  # by `step=` wandb drops what a resumed run repeats
            self.run.log(numbers | {"step": line["step"]})

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


class FaultTolerantTracker:
    """Wrap a tracker that may fail: `told` receives the first failure, and it is called no more."""

    def __init__(self, name: str, tracker: Tracker, told: Callable[[str], None]) -> None:
        self.name, self.tracker, self.told = name, tracker, told
        self.failed = False

    def start(self, event: RunStarted) -> None:
        self.trying(lambda: self.tracker.start(event))

    def log(self, line: Line) -> None:
        self.trying(lambda: self.tracker.log(line))

    def close(self) -> None:
        self.trying(self.tracker.close)

    def trying(self, do: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            do()
        except Exception as error:  # no failure of a tracking library may end the run
            self.failed = True
            said = " ".join(str(error).split())[:300]
            self.told(f"{self.name} does not take the run's numbers ({said}): metrics.jsonl has them")


def trackers_of(recipe: Recipe, folder: Path, told: Callable[[str], None]) -> Sequence[Tracker]:
    """Build the trackers that the recipe names.

    Raises:
        Failure: (preflight) a package is not installed.
    """
    found: list[Tracker] = []
    for name in recipe.logging.report_to:
        if find_spec(name) is None:
            hints = (command_to_add(name), "or logging.report_to=none")
            raise Failure("preflight", f"logging.report_to: {name} is not installed", hints=hints)
        tracker = Tensorboard(recipe, folder) if name == "tensorboard" else Hosted(name, recipe, folder)
        found.append(FaultTolerantTracker(name, tracker, told))
    return found
