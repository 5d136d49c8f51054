"""A model of transformers cut into stages: consecutive layers on one machine each, as a ring.

    stage 0    embeddings, layers          ->  stage 1 .. S - 1: layers  ->  stage 0    norm, head, loss

The first stage has both ends of the model. A matrix that is embedding and head at once is so held once, and
tokens and labels stay on one machine. Layers that are elsewhere are modules without parameters, so the names
of a stage's parameters are those of the whole model, and its vector is ranges of the whole's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes.errors import ModelError
from recipes.objectives import causal_model, decoder_inputs, loss_sum, replaced_forward
from recipes.weight_files import Layout


@dataclass(frozen=True)
class Architecture:
    """A decoder's modules around a cut, by their names."""

    layers: str  # the list of layers
    after: tuple[str, ...]  # applied in this order to the output of the last layer
    before: tuple[str, ...] = ()  # applied to the embeddings, on their way to the first layer
    positions: str | None = None  # its output is added to the embeddings
    tuples: bool = False  # a layer returns a tuple


ARCHITECTURES = {
    "GPT2LMHeadModel": Architecture("h", ("ln_f",), ("drop",), "wpe"),
    "GPTJForCausalLM": Architecture("h", ("ln_f",), ("drop",), tuples=True),
    "GPTNeoXForCausalLM": Architecture("layers", ("final_layer_norm",), ("emb_dropout",)),
    "OPTForCausalLM": Architecture(
        "layers", ("final_layer_norm", "project_out"), ("project_in",), "embed_positions"
    ),
    "LlamaForCausalLM": Architecture("layers", ("norm",)),
    "Qwen3ForCausalLM": Architecture("layers", ("norm",)),
}


class LayerElsewhere(nn.Module):
    """A layer that another stage has: returns its input."""

    def __init__(self, tuples: bool) -> None:
        super().__init__()
        self.tuples = tuples

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        return (hidden,) if self.tuples else hidden


class NothingAdded(nn.Module):
    """Positions that another stage has added already: returns a zero, whatever it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def architecture_of(model: nn.Module) -> Architecture:
    """Look up where a model can be cut. Errors: ModelError names a class that cannot be."""
    name = type(causal_model(model)).__name__
    if name not in ARCHITECTURES:
        raise ModelError(f"{name} cannot be cut into stages; {', '.join(sorted(ARCHITECTURES))} can")
    return ARCHITECTURES[name]


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the list of layers. Errors: ModelError."""
    found: nn.ModuleList = getattr(causal_model(model).get_decoder(), architecture_of(model).layers)
    return found


class StageModel:
    """The part of a model that one stage computes. Cuts `model`, which may have adapters, in place.

    Args:
        layers: numbers of this stage's; range(0, 0): none, which the first stage may have.
        first: the stage that has embeddings, final norm and head beside its layers.
    """

    def __init__(self, model: nn.Module, layers: range, first: bool) -> None:
        self.model, self.first = model, first
        self.causal: Any = causal_model(model)
        self.decoder: Any = self.causal.get_decoder()
        self.names = architecture_of(model)
        every = layers_of(model)
        if not (0 <= layers.start <= layers.stop <= len(every) and layers.step == 1 and (layers or first)):
            raise ValueError(f"layers {layers.start} to {layers.stop} of {len(every)}")
        for number in range(len(every)):
            if number not in layers:
                every[number] = LayerElsewhere(self.names.tuples)
        if not first:
            self._drop_ends()

    def _drop_ends(self) -> None:
        """Replace all but the layers by modules without parameters."""
        for name in (*self.names.before, *self.names.after):
            setattr(self.decoder, name, nn.Identity())
        if self.names.positions is not None:
            setattr(self.decoder, self.names.positions, NothingAdded())
        for owner, held in (
            (self.causal, self.causal.get_output_embeddings()),
            (self.decoder, self.decoder.get_input_embeddings()),
        ):
            for name, child in list(owner.named_children()):
                if child is held:
                    setattr(owner, name, nn.Identity())

    def enter(self, batch: Mapping[str, Tensor]) -> Tensor:
        """First stage: a batch of `collate` to the output of its last layer, (B, T, D)."""
        inputs = decoder_inputs(self.model, batch)
        with ExitStack() as skipped:
            for module in self._after():
                skipped.enter_context(replaced_forward(module, lambda hidden: hidden))
            return self._decode(inputs).reshape(*batch["input_ids"].shape, -1)

    def through(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Other stages: the input of the first layer to the output of the last, (B, T, D). Of `batch` the
        mask and the positions are read."""
        inputs = decoder_inputs(self.model, batch)
        inputs.pop("input_ids", None)
        laid_out = next(iter(inputs.values())).shape  # (B, T), or (1, B T) where flash attention isolates
        embeds = hidden.to(self.causal.dtype).reshape(*laid_out, -1)
        return self._decode({"inputs_embeds": embeds, **inputs}).reshape(hidden.shape)

    def loss(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """First stage: the output of the model's last layer to the sum of the token losses, and their number,
        as `loss_sum` of the whole model."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        hidden = hidden.to(self.causal.dtype)
        for module in self._after():
            hidden = module(hidden)
        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
        with replaced_forward(self.decoder, lambda *args, **kwargs: output):
            return loss_sum(self.model, batch)

    def _after(self) -> list[nn.Module]:
        found = (getattr(self.decoder, name) for name in self.names.after)
        return [module for module in found if module is not None]

    def _decode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        hidden: Tensor = self.decoder(**inputs, use_cache=False).last_hidden_state
        return hidden


def stage_ranges(whole: Layout, part: Layout) -> tuple[range, ...]:
    """Find the ranges of the whole model's vector that a stage's vector consists of, in order."""
    found: list[range] = []
    places = {name: number for number, name in enumerate(whole.names)}
    for name in part.names:
        start, stop = whole.offsets[places[name]], whole.offsets[places[name] + 1]
        if found and found[-1].stop == start:
            found[-1] = range(found[-1].start, stop)
        else:
            found.append(range(start, stop))
    return tuple(found)
