"""The layers of a model that repeat, so that few of them are traced instead of all.

Layers are alike where all that is in them is: classes, settings, shapes. Their order has a period: one layer
in most models, two or more where kinds alternate (sliding and full attention, every n-th layer checkpointed).
Each period beyond the first adds the same bytes and the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

PLACES = {"layer_idx", "layer_id", "layer_index"}  # attributes that are a layer's place and nothing else


@dataclass(frozen=True)
class RepeatedLayers:
    """A decoder's list of layers, and how few of them show what each period adds."""

    decoder: nn.Module
    name: str  # of the list in the decoder
    layers: tuple[nn.Module, ...]
    few: int  # the first layers that begin and end as all of them do
    period: int

    @property
    def left_out(self) -> int:
        """Periods that the few lack."""
        return (len(self.layers) - self.few) // self.period

    @contextmanager
    def cut(self, count: int) -> Iterator[None]:
        """Let the decoder have its first `count` layers only."""
        config: Any = self.decoder.config
        lists = {name: getattr(config, name) for name in lists_of(config)}
        try:
            self._set(self.layers[:count], {name: values[:count] for name, values in lists.items()})
            yield
        finally:
            self._set(self.layers, lists)

    def _set(self, layers: Sequence[nn.Module], lists: Mapping[str, Any]) -> None:
        setattr(self.decoder, self.name, nn.ModuleList(layers))
        for name, value in {"num_hidden_layers": len(layers), **lists}.items():
            setattr(self.decoder.config, name, value)


def repeated_layers(causal: Any) -> RepeatedLayers | None:
    """Find the layers of a model of transformers that repeat; None: tracing all of them takes no longer."""
    decoder = causal.get_decoder() if hasattr(causal, "get_decoder") else causal
    config = getattr(decoder, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, tuple(child))
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1:
        return None
    [(name, layers)] = lists
    listed = [getattr(config, name) for name in lists_of(config)]
    kinds = [(kind_of(layer), *(values[i] for values in listed)) for i, layer in enumerate(layers)]
    few, period = repetition(kinds)
    return RepeatedLayers(decoder, name, layers, few, period) if 2 * few + period < len(layers) else None


def repetition(kinds: Sequence[object]) -> tuple[int, int]:
    """Find (few, period). From some place on kinds repeat with `period`; the first `few` have those before
    it, one period and the remainder. Of all periods the one whose `few` and `few + period` are fewest.
    """
    found = []
    for period in range(1, len(kinds)):
        unlike = [i for i in range(len(kinds) - period) if kinds[i] != kinds[i + period]]
        least = max((unlike[-1] + 1 if unlike else 0) + period, 2)
        found.append((least + (len(kinds) - least) % period, period))
    return min(found, key=lambda each: 2 * each[0] + each[1], default=(len(kinds), 1))


def lists_of(config: Any) -> list[str]:
    """Names of what a config lists layer by layer."""
    count = config.num_hidden_layers
    return [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    ]


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Describe a layer by all that decides what it computes and keeps, apart from its place."""
    return tuple((name, type(module), *settings_of(module)) for name, module in layer.named_modules())


def settings_of(module: nn.Module) -> Iterator[object]:
    for name, value in vars(module).items():
        if name not in PLACES and isinstance(value, bool | int | float | str | torch.dtype | None):
            yield name, value
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name, tensor.shape, tensor.dtype, tensor.requires_grad
