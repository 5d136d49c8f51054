"""x_0 as named tensors, the stand-ins for peers' samples, and the objective that only peers know.

    folder/model.safetensors    each trained parameter by its name in the model, float32, in the model's order
    folder/config.json          the model's own, or {} of one that has none; both go on to the result

`save_base` writes such a folder. Hub and peers know no more of a model than that: the order of the names is
the vector's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import zip_longest
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cocktail_cli.assembly import ModelOnDisk
from cocktail_cli.ui import events
from recipes.config import Recipe
from recipes.data import Corpus, Sample
from recipes.errors import ModelError
from recipes.objectives import BatchLoss, Bounds
from recipes.weight_files import (
    WEIGHTS_FILE,
    WIDTHS,
    Layout,
    StoredVector,
    check_finite,
    layout_of,
    model_config_files,
    open_tensors,
    write_safetensors,
)

SAVE = "cocktail_cli.save_base(model, FOLDER) writes it, of the model as peers train it"


def save_base(model: nn.Module, folder: str | Path) -> None:
    """Write what a run of own loops begins with: the parameters that `model` trains, and its config."""
    path, config = Path(folder), getattr(model, "config", None)
    path.mkdir(parents=True, exist_ok=True)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(path)  # type: ignore[union-attr]
    else:
        (path / "config.json").write_text(json.dumps({"architectures": [type(model).__name__]}) + "\n")
    layout_of(model)  # raises where nothing is trained
    trained = {name: p.detach().float() for name, p in model.named_parameters() if p.requires_grad}
    write_safetensors(path / WEIGHTS_FILE, trained, {"format": "pt"})


def open_named(folder: Path) -> StoredVector:
    """Open the tensors of a folder, in their order. Raises ModelError."""
    with ExitStack() as files:
        tensors = open_tensors(folder, files)
        codes = [name for name, tensor in tensors.items() if tensor.dtype not in WIDTHS]
        if codes or not tensors:
            said = f"{codes[0]} is {tensors[codes[0]].dtype}" if codes else "no model.safetensors"
            raise ModelError(f"{folder}: {said}, expected parameters by name, as floats", SAVE)
        layout = Layout(tuple(tensors), tuple(tensor.shape for tensor in tensors.values()))
        texts = model_config_files(folder)
        opened = files.pop_all()
    return StoredVector(layout, layout.names, tuple(tensors.values()), {}, opened, config_files=texts)


def check_layout(model: Layout, run: Layout) -> None:
    """Raise ModelError with the first difference where a model trains something else than its run."""
    pairs = (zip(one.names, one.shapes, strict=True) for one in (model, run))
    for number, (mine, its) in enumerate(zip_longest(*pairs)):
        if mine != its:
            ours, theirs = (f"{one[0]} {one[1]}" if one else "none" for one in (mine, its))
            sizes = f"{model.size:,} and {run.size:,} parameters"
            raise ModelError(
                f"parameter {number}: this model trains {ours}, the run {theirs} ({sizes})", SAVE
            )


def check_base(folder: Path) -> None:
    """Raise ModelError where the tensors of a folder cannot be trained."""
    stored = open_named(folder)
    with stored.files:
        check_finite(folder, dict(zip(stored.names, stored.parts, strict=True)), SAVE)


def measure(function: Callable[[dict[str, Tensor]], float], model: ModelOnDisk) -> events.Event:
    """Measure a model on the host's disk by a function of the host's own, which gets its tensors by name; a
    warning where that fails: nothing depends on it."""
    try:
        with closing(open_named(model.folder)) as stored:
            vector = torch.from_numpy(stored.read(0, stored.layout.size))
            loss = float(function(stored.layout.by_name(vector)))
        if not isfinite(loss):
            raise ValueError(f"it returned {loss}")
    except Exception as error:
        return events.Warning(
            f"--evaluate, the model after {model.round} rounds: {type(error).__name__}: {error}"
        )
    return events.Eval(model.step, model.round, loss)


def stand_in() -> Sample:
    """Make a sample of one trained token."""
    return Sample(np.zeros(2, np.int32), np.arange(2) > 0)


def stand_ins(recipe: Recipe, held_out: int) -> Corpus:
    """Make a corpus of the run's length: one sample, leased again and again."""
    one = stand_in()
    return Corpus((one,), (one,) * held_out, recipe.training.total_samples(0), recipe.training.seed, False)


@dataclass(frozen=True)
class Brought:
    """The objective of a peer's own loop: a loss, and the samples that it is of for each leased one."""

    ranges: tuple[Bounds, ...]

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        return self.ranges

    def terms(self, samples: Sequence[Sample]) -> int:
        return len(samples)

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        """Raise: the hub's side knows no loss."""
        raise ModelError("the loss of this run is in its peers' own loops", "cocktail_cli.join_with")

    def longest(self, length: int) -> Sample:
        return stand_in()

    def uncounted(self, like: Sample) -> Sample:
        return Sample(like.tokens, np.zeros(len(like.tokens), bool))
