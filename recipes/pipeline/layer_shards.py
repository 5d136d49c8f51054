"""Shards that end where layers do, so each stage's part of the vector is whole shards."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from torch import nn

from recipes.config import Recipe
from recipes.models import meta_trained_model
from recipes.weight_files import layout_of

from .stage_model import layers_of


def layer_ends(model: nn.Module) -> tuple[int, ...]:
    """Find where each layer ends in the vector, and what stands before, between and behind the layers.

    Errors: ModelError where the model cannot be cut into stages.
    """
    layer_at = {id(p): number for number, layer in enumerate(layers_of(model)) for p in layer.parameters()}
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    ends, stop = list[int](), 0
    for _, parameters in groupby(trained, lambda parameter: layer_at.get(id(parameter))):
        stop += sum(parameter.numel() for parameter in parameters)
        ends.append(stop)
    assert stop == layout_of(model).size
    return tuple(ends)


def cut_at_layers(recipe: Recipe, base: Path) -> Recipe:
    """Write into a recipe where the shards of its model end, at layers. Errors: ModelError."""
    ends = layer_ends(meta_trained_model(recipe, base))
    return recipe.model_copy(update={"compression": recipe.compression.model_copy(update={"shards": ends})})
