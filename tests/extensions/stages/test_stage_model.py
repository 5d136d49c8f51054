"""Stages compute what the whole model does, hold their share of it, and are ranges of its vector."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CLASSES, CONFIGS

from cocktail_cli.extensions.stages.compute import (
    StageModel,
    architecture_of,
    parameter_costs,
    partition_layers,
    stage_ranges,
)
from recipes.config import Lora
from recipes.data import Sample, collate
from recipes.errors import ModelError
from recipes.models import add_adapters
from recipes.objectives import loss_sum
from recipes.weight_files import layout_of

SIX = [*CONFIGS, "qwen3_tied", "opt_projected"]


def config_of(kind: str) -> Any:
    if kind == "opt_projected":
        config = CONFIGS["opt"]()
        config.word_embed_proj_dim = 16
    else:
        config = CLASSES[kind]()
    config.num_hidden_layers = 3
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 3
    return config


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config_of(kind)).float().eval()


def sample_of(*documents: int, seed: int = 0) -> Sample:
    length = sum(documents)
    trained = np.ones(length, bool)
    trained[np.cumsum((0, *documents[:-1]))] = False
    tokens = np.random.default_rng(seed).integers(0, 320, length).astype(np.int32)
    return Sample(tokens, trained, documents if len(documents) > 1 else ())


def stages_of(model: Any, count: int) -> list[StageModel]:
    parts = partition_layers(parameter_costs(model), [1.0] * count)
    return [StageModel(deepcopy(model), part, number == 0) for number, part in enumerate(parts)]


def forward_and_back(stages: list[StageModel], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One micro-batch through all stages: each boundary is cut, as a wire cuts it."""
    elsewhere = {name: tensor for name, tensor in batch.items() if name not in ("input_ids", "labels")}
    made = [stages[0].enter(batch)]
    taken: list[torch.Tensor] = []
    for stage in stages[1:]:
        taken.append(made[-1].detach().requires_grad_())
        made.append(stage.through(taken[-1], elsewhere))
    taken.append(made[-1].detach().requires_grad_())
    loss, _ = stages[0].loss(taken[-1], batch)
    loss.backward()
    for output, following in zip(reversed(made), reversed(taken), strict=True):
        assert following.grad is not None
        if output.requires_grad:  # with adapters the embeddings are frozen
            output.backward(following.grad)
    return loss.detach()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", SIX)
def test_stages_have_loss_and_gradient_of_the_whole_model(kind: str, adapters: bool) -> None:
    """Two and four stages of every class: the loss is equal, and each gradient to rounding, whether all
    is trained or adapters are, and for padded rows and packed documents alike."""
    model = model_of(kind)
    if adapters:
        model = add_adapters(model, Lora())
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        model.eval()  # no dropout in adapters
    padded, packed = [sample_of(9), sample_of(5, seed=1)], [sample_of(4, 6, seed=2), sample_of(8, 2, seed=3)]
    for samples, counts in ((padded, [4] if adapters else [2, 4]), (packed, [2])):
        batch = collate(samples)
        whole = deepcopy(model)
        loss, _ = loss_sum(whole, batch)
        loss.backward()
        wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        for count in counts:
            stages = stages_of(model, count)
            torch.testing.assert_close(forward_and_back(stages, batch), loss.detach())
            found = [
                (name, p.grad) for s in stages for name, p in s.model.named_parameters() if p.requires_grad
            ]
            assert sorted(name for name, _ in found) == sorted(wanted)
            for name, gradient in found:
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SIX)
def test_the_vectors_of_stages_are_ranges_that_cover_the_whole_once(kind: str) -> None:
    """Every coordinate of the model's vector is in one stage's ranges; only the first stage has two."""
    model = model_of(kind)
    whole, places = layout_of(model), []
    for number, stage in enumerate(stages_of(model, 3)):
        ranges = stage_ranges(whole, layout_of(stage.model))
        assert len(ranges) <= (2 if number == 0 else 1)
        assert sum(map(len, ranges)) == layout_of(stage.model).size
        places += ranges
    assert [at for part in sorted(places, key=lambda part: part.start) for at in part] == list(
        range(whole.size)
    )


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_stage_holds_its_share_of_the_model(stages: int) -> None:
    """No stage of a model whose layers dominate has more than 1/S of its parameters and 10 %."""
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=256, num_hidden_layers=48, num_attention_heads=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    total = layout_of(model).size
    sizes = [layout_of(stage.model).size for stage in stages_of(model, stages)]

    assert sum(sizes) == total
    assert max(sizes) <= 1.1 * total / stages


def test_a_class_that_cannot_be_cut_is_refused_by_name() -> None:
    """The error names the class, and those that can be cut."""
    with pytest.raises(ModelError, match=r"PhiForCausalLM cannot be cut into stages; .*LlamaForCausalLM"):
        architecture_of(model_of("phi"))
