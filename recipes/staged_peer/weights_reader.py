"""Reads a model's weights from disk, for the stages that need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from recipes.config import Recipe
from recipes.models import frozen_name, open_trained, open_vector
from recipes.weight_files import StoredVector

# of weights, as a stage names them
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
WINDOW = 1 << 21  # parameters of a `fill`: 8 MiB, which a line takes at once


class WeightsReader:
    """Reads the values of parameters: what is trained, of x'; the rest, of the base."""

    def __init__(self, trained: StoredVector, base: StoredVector | None) -> None:
        self.trained, self.base = trained, base

    def has(self, wanted: object) -> bool:
        """Tell whether this is name, size and dtype of a parameter, as a stage asks for it."""
        if not isinstance(wanted, list | tuple) or [type(one) for one in wanted] != [str, int, str]:
            return False
        name, _, dtype = wanted
        frozen = self.base is not None and frozen_name(self.base, name) in self.base.layout.names
        return dtype in DTYPES and (frozen or name in self.trained.layout.names)

    def windows(self, name: str, dtype: str) -> Iterator[tuple[int, bytes]]:
        """Yield the start and the bytes of each window of a parameter."""
        stored = self.trained
        if name not in stored.layout.names:
            assert self.base is not None
            stored, name = self.base, frozen_name(self.base, name)
        at = stored.layout.names.index(name)
        first, last = stored.layout.offsets[at], stored.layout.offsets[at + 1]
        for start in range(first, last, WINDOW):
            values = torch.from_numpy(stored.read(start, min(start + WINDOW, last))).to(DTYPES[dtype])
            yield start - first, values.view(torch.uint8).numpy().tobytes()


@contextmanager
def open_weights(recipe: Recipe, base: Path, snapshot: Path | None = None) -> Iterator[WeightsReader]:
    """Open the model in `base`, at x' of a snapshot, or x_0. Errors: ModelError."""
    with ExitStack() as files:
        trained = files.enter_context(closing(open_trained(recipe, base, snapshot)))
        frozen = None
        if recipe.lora is not None:
            frozen = files.enter_context(closing(open_vector(base, recipe.model.trust_remote_code)))
        yield WeightsReader(trained, frozen)
