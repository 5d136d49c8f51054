"""A model on the meta device, and its parameters filled one block at a time.

A model larger than a device, or a host, is never there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.config import Recipe
from recipes.downloads import from_pretrained_options
from recipes.errors import ModelError
from recipes.weight_files import Layout, StoredVector, not_loadable, quiet_transformers

from .lora import base_parameter_name
from .trainable import available_attention, frozen_dtype, prepare_for_training

WINDOW = 1 << 22  # parameters read at a time


def build_on_meta(base: Path, recipe: Recipe, device: torch.device) -> Any:
    """Build the model like `load_trained`: parameters without memory, buffers as they should be.

    Raises:
        ModelError: also where buffers are stored with its weights: parameters alone do not make it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    wanted = recipe.model
    attention = available_attention(wanted.attn_implementation, device)
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    # trained weights are masters in float32, whatever is computed in
    dtype = torch.float32 if recipe.lora is None else frozen_dtype(recipe, base, device)
    if dtype is not None:
        chosen["dtype"] = dtype
    told = from_pretrained_options(base, wanted.trust_remote_code)
    try:
        with parameters_on_meta():
            config = AutoConfig.from_pretrained(base, **told)
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, trust_remote_code=wanted.trust_remote_code, **chosen
            )
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        raise not_loadable(base, "causal language model", error) from error
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if stored := sorted(model.state_dict().keys() - names):
        raise ModelError(f"{base}: the buffer {stored[0]} cannot be spread over several devices", "--gpus 1")
    with parameters_on_meta():
        return prepare_for_training(model, recipe)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are made inside on the meta device. One thread at a time, under the
    lock of transformers' loading: modules that another makes meanwhile have theirs there, too."""
    with quiet_transformers():
        register = nn.Module.register_parameter

        def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta:  # one that is: tied to another
                parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            register(module, name, parameter)

        nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def frozen_name(stored: StoredVector, name: str) -> str:
    """Name in the layout of the base what a model with adapters calls so, and does not train."""
    name = base_parameter_name(name).replace(".base_layer", "").replace(".original_module", "")
    return stored.tied.get(name, name)


class ParameterFiller:
    """Gives the parameters of a model on the meta device their values: what is trained, out of the vector;
    the rest, of the base, as it is stored."""

    def __init__(self, model: nn.Module, layout: Layout, vector: Tensor, device: torch.device) -> None:
        self.layout, self.vector, self.device = layout, vector, device
        self.stored: StoredVector | None = None  # the base, where some of it is not trained
        self.waiting = {parameter: name for name, parameter in model.named_parameters()}  # by identity

    def fill(self, module: nn.Module) -> None:
        """Fill the parameters of `module` that have none yet. Errors: ModelError: one is tied elsewhere."""
        here: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for name, empty in list(owner.named_parameters(recurse=False)):
                if not empty.is_meta:
                    continue
                if empty not in here:
                    if empty not in self.waiting:
                        said = f"{name}, tied across blocks, cannot be spread over several devices"
                        raise ModelError(said, "--gpus 1")
                    here[empty] = self.value(self.waiting.pop(empty), empty)
                setattr(owner, name, here[empty])

    def value(self, name: str, empty: nn.Parameter) -> nn.Parameter:
        values = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        layout, flat = self.layout, values.view(-1)
        if frozen := not empty.requires_grad:
            assert self.stored is not None
            layout, name = self.stored.layout, frozen_name(self.stored, name)
        first = layout.offsets[layout.names.index(name)]
        for start in range(0, len(flat), WINDOW):
            stop = min(start + WINDOW, len(flat))
            place = first + start, first + stop
            flat[start:stop] = self.of_base(*place) if frozen else self.vector[slice(*place)]
        return nn.Parameter(values, empty.requires_grad)

    def of_base(self, start: int, stop: int) -> Tensor:
        assert self.stored is not None
        return torch.from_numpy(self.stored.read(start, stop))
