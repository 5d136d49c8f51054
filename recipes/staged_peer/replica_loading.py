"""Loads a replica: the head reads the model's weights from its disk, and gives every machine its stage's.

Values go around the ring window by window, those of a frozen base in its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from recipes.config import Recipe
from recipes.errors import StageFailed
from recipes.models import frozen_name, meta_trained_model, open_trained, open_vector
from recipes.pipeline import parameter_costs, partition_layers
from recipes.weight_files import StoredVector

from .ring_head import RingHead
from .stage_machine import CONFIG

WINDOW = 1 << 21  # parameters of a `fill`: 8 MiB, which a line takes at once


class WeightsReader:
    """Reads the values of parameters at the head: what is trained, of x'; the rest, of the base."""

    def __init__(self, trained: StoredVector, base: StoredVector | None) -> None:
        self.trained, self.base = trained, base

    def windows(self, name: str, dtype: str) -> Iterator[tuple[int, bytes]]:
        """Yield the start and the bytes of each window of a parameter."""
        stored = self.trained
        if name not in stored.layout.names:
            assert self.base is not None
            stored, name = self.base, frozen_name(self.base, name)
        at = stored.layout.names.index(name)
        first, last = stored.layout.offsets[at], stored.layout.offsets[at + 1]
        kind = getattr(torch, dtype.removeprefix("torch."))
        for start in range(first, last, WINDOW):
            values = torch.from_numpy(stored.read(start, min(start + WINDOW, last))).to(kind)
            yield start - first, values.view(torch.uint8).numpy().tobytes()


def load_replica(
    ring: RingHead, recipe: Recipe, base: Path, snapshot: Path | None = None, name: str = "", round: int = 0
) -> None:
    """Give every machine its stage of the model in `base`, at x' of `round`: of a snapshot, or x_0.

    Errors: ModelError: the model cannot be cut, or not so; StageLost, StageFailed.
    """
    costs = parameter_costs(meta_trained_model(recipe, base))
    try:
        cut = partition_layers(costs, [1.0] * ring.stages, first=int(recipe.lora is not None))
    except ValueError as error:
        raise StageFailed(f"this model has too few layers: {error}") from None
    layers = [(one.start, one.stop) for one in cut]
    config = (base / CONFIG).read_text(encoding="utf-8")
    answers = ring.ask("load", recipe=recipe.to_json(), config=config, layers=layers)
    with ExitStack() as files:
        trained = files.enter_context(closing(open_trained(recipe, base, snapshot)))
        frozen = None
        if recipe.lora is not None:
            frozen = files.enter_context(closing(open_vector(base, recipe.model.trust_remote_code)))
        reader = WeightsReader(trained, frozen)
        for stage, answer in enumerate(answers):
            for name, _, dtype in answer.values["parameters"]:
                for start, values in reader.windows(name, dtype):
                    data = [values if at == stage else b"" for at in range(ring.stages)]
                    ring.ask("fill", data, stage=stage, name=name, start=start)
    ring.ask("begin", name=name, round=round, step=ring.steps)
