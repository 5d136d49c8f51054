"""Shards cut at layers: every stage of every partition is whole shards."""

from copy import deepcopy
from itertools import combinations_with_replacement

import pytest
from test_stage_model import SIX, model_of

from cocktail_cli.extensions.stages.compute import StageModel, layer_ends, stage_ranges
from compress import Cocktail, within
from recipes.config import Lora
from recipes.models import add_adapters
from recipes.weight_files import layout_of


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("kind", SIX)
def test_every_stage_is_a_union_of_shards(kind: str, adapters: bool) -> None:
    """Three stages of three layers, cut at any place: together all shards, each once."""
    model = model_of(kind)
    if adapters:
        model = add_adapters(model, Lora(lora_r=2))
    whole, ends = layout_of(model), layer_ends(model)
    shards = Cocktail(shards=ends).cut(whole.size, seed=7)
    for first, second in combinations_with_replacement(range(1, 4), 2):
        cuts = [c for c in (range(first), range(first, second), range(second, 3)) if c]
        numbers = list[int]()
        for layers in cuts:
            stage = StageModel(deepcopy(model), layers, first=layers.start == 0)
            part = within(shards, stage_ranges(whole, layout_of(stage.model)))
            numbers += [shard.number for shard in part]
        assert sorted(numbers) == list(range(len(shards)))
