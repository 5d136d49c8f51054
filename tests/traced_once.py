"""Micro-batches of models just alike are traced once in a process, for tests whose claim is another one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from recipes import planning
from recipes.objectives import causal_model

trace, kind_of = planning.activations.trace, planning.activations.kind_of
traced: dict[tuple[object, ...], Any] = {}


def trace_once(model: nn.Module, batch: int, length: int, half: torch.dtype | None = None) -> Any:
    """Trace as `trace` does. Alike is what has the same classes, settings, shapes and config."""
    config = causal_model(model).config
    attention = config._attn_implementation
    alike = (kind_of(model), config.to_json_string(), attention, batch, length, half)
    if alike not in traced:
        traced[alike] = trace(model, batch, length, half)
    return traced[alike]


@pytest.fixture(scope="module", autouse=True)
def traces_are_shared() -> Iterator[None]:
    """Plan with `trace_once`, in each test of the folder that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.planning.memory_plan.trace", trace_once)
        yield
