"""Trackers of experiments: the host reports a run's numbers to TensorBoard, Weights & Biases or Trackio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from cocktail_cli.assembly import Extension, View, ViewParts
from cocktail_cli.errors import Failure
from cocktail_cli.host import run_folder
from cocktail_cli.installation import command_to_add
from cocktail_cli.ui import Event, Line, RunStarted, Warning

FOLDER = "tracking"  # the trackers' files, in the run's folder
GROUPS = {  # groups of curves
    "train": ("loss", "tokens", "tokens_per_s", "samples", "lr", "grad_norm"),
    "time": ("step_s", "compute_s", "wait_s", "sync_s"),
    "swarm": ("peers", "late", "up_bytes", "down_bytes", "ratio_fp16", "packet_bytes"),
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def metric_names(line: Line) -> dict[str, float]:
    """Rename a line's numbers as trackers expect them: train/loss, eval/loss, time/step_s, ..."""
    found = {}
    for name, value in line.items():
        group = "train" if "/" in name else GROUP_OF.get(name, "")  # a slash: a figure of the objective
        if line["kind"] == "eval":
            group = "eval" if name.startswith("eval_") else ""
        if group and value is not None:
            found[f"{group}/{name.removeprefix('eval_')}"] = float(value)
    return found


class Tracker:
    """A tracker, opened when the run starts. One that fails is reported once and called no more.

    Raises:
        Failure: (preflight) its package is not installed.
    """

    def __init__(self, name: str, project: str, parts: ViewParts) -> None:
        if find_spec(name) is None:
            hints = (command_to_add(name), "or report_to=none")
            raise Failure("preflight", f"trackers.report_to: {name} is not installed", hints=hints)
        self.name, self.project, self.parts = name, project, parts
        self.folder = parts.folder / FOLDER
        self.metrics = run_folder.metrics_of(parts.folder, parts.recipe)
        self.run: Any = None  # of the tracking library

    def show(self, event: Event) -> None:
        """Report the numbers of an event."""
        with self._tolerated():
            if isinstance(event, RunStarted):
                self.run = self._tensorboard() if self.name == "tensorboard" else self._hosted(event)
            for line in self.metrics.lines(event) if self.run is not None else ():
                if numbers := metric_names(line):
                    self._log(numbers, line["step"], line["round"])

    def close(self) -> None:
        """Have the tracker write what it has."""
        with self._tolerated():
            if self.run is not None:
                self.run.close() if self.name == "tensorboard" else self.run.finish()

    def _tensorboard(self) -> Any:
        """Write scalars into the run's folder: `tensorboard --logdir outputs/NAME/tracking`."""
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(self.folder))

    def _hosted(self, event: RunStarted) -> Any:
        """Log to wandb or trackio, which share an interface. A resumed run continues under its name."""
        self.folder.mkdir(exist_ok=True)
        recipe = self.parts.recipe
        return import_module(self.name).init(
            project=self.project,
            name=event.run,
            config=recipe.model_dump(mode="json") | {"recipe_hash": recipe.recipe_hash},
            resume="allow",
            **({"id": event.run, "dir": str(self.folder)} if self.name == "wandb" else {}),
        )

    def _log(self, numbers: dict[str, float], step: int, round: int) -> None:
        if self.name == "tensorboard":
            for name, value in numbers.items():
                self.run.add_scalar(name, value, step)
            self.run.flush()
        elif self.name == "trackio":  # `step` is a reserved name there
            self.run.log(numbers | {"round": round}, step=step)
        else:  # by `step=` wandb drops what a resumed run repeats
            self.run.log(numbers | {"round": round, "step": step})

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # no failure of a tracking library may end the run
            self.run = None
            said = " ".join(str(error).split())[:300]
            self.parts.tell(
                Warning(f"{self.name} does not take the run's numbers ({said}): metrics.jsonl has them")
            )


class Trackers(Extension):
    """Only the host reports, and only what the recipe asks for."""

    def views(self, parts: ViewParts) -> Sequence[View]:
        """Make a view for each tracker. Raises Failure (preflight) where one is not installed."""
        from .keys import Keys

        section = parts.recipe.extensions["trackers"]
        assert isinstance(section, Keys)
        return [Tracker(name, section.project, parts) for name in section.report_to]


extension = Trackers()
