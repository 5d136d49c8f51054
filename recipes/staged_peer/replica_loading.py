"""Loads a replica: the head reads the model's weights from its disk, and gives every machine its stage's.

Values go around the ring window by window, those of a frozen base in its own dtype.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from recipes.config import Recipe
from recipes.models import frozen_name, meta_trained_model, open_trained, open_vector
from recipes.pipeline import cut_of, parameter_costs
from recipes.weight_files import StoredVector

from .ring_head import RingHead
from .stage_machine import CONFIG

# of weights, as a stage names them
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
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
        if dtype not in DTYPES:
            raise ValueError(f"a stage wants {name} in {dtype}, not in one of {', '.join(DTYPES)}")
        for start in range(first, last, WINDOW):
            values = torch.from_numpy(stored.read(start, min(start + WINDOW, last))).to(DTYPES[dtype])
            yield start - first, values.view(torch.uint8).numpy().tobytes()


def load_replica(
    ring: RingHead, recipe: Recipe, base: Path, snapshot: Path | None = None, name: str = "", round: int = 0
) -> bool:
    """Give every machine its stage of the model in `base`, at x' of `round`: of a snapshot, or x_0.

    Machines that have their part from this head, at that round or a later one, keep it where the head has its
    own. Returns whether some did: `mend` is to follow then.

    Errors: ModelError: the model cannot be cut, or not so; StageLost, StageFailed.
    """
    cut = ring.layers or cut_of(parameter_costs(meta_trained_model(recipe, base)), ring.stages, recipe)
    held = [answer.values for answer in ring.held()]
    kept = [bool(ring.key) and one["key"] == ring.key and one["round"] >= round for one in held]
    if not kept[0]:
        kept, ring.key = [False] * ring.stages, secrets.token_hex(8)
    layers = {str(stage): (one.start, one.stop) for stage, one in enumerate(cut) if not kept[stage]}
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
    ring.ask("begin", name=name, round=round, step=ring.steps, key=ring.key)
    return any(kept)
