"""The plan of a replica's machines, beside that of one machine and beside what stages are."""

from copy import deepcopy
from pathlib import Path

import pytest
import transformers
from tiny_models import CLASSES
from transformers import AutoModelForCausalLM

from cocktail_cli.assembly import recipe_type
from cocktail_cli.extensions.stages.compute import (
    StageMemory,
    StageModel,
    parameter_costs,
    partition_layers,
    plan_stages,
)
from recipes.config import Recipe, load_resolved
from recipes.errors import ModelError
from recipes.planning import Machine, plan_memory

LENGTH, LAYERS = 32, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    config = CLASSES["llama"]()
    config.num_hidden_layers, config.architectures = LAYERS, ["LlamaForCausalLM"]
    config.save_pretrained(place)
    return place


def recipe(*overrides: str) -> Recipe:
    texts = [f"data.max_length={LENGTH}", *overrides]
    return load_resolved("smoke", texts, extend=recipe_type).recipe


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_vectors_of_a_plan_are_those_of_the_largest_stage(folder: Path, stages: int) -> None:
    """Weights, x', gradient and optimizer are 4, 4, 4 and 8 bytes of each of its parameters; activations are
    of all micro-batches in flight, logits of one."""
    whole = plan_memory(recipe(), folder, 1, Machine(1 << 40))
    found = plan_stages(recipe(), folder, stages).memory(whole)

    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    parts = [
        StageModel(deepcopy(model), layers, first=number == 0)
        for number, layers in enumerate(partition_layers(parameter_costs(model), [1.0] * stages))
    ]
    largest = max(sum(p.numel() for p in part.model.parameters()) for part in parts)
    for name, each in (("weights", 4), ("common", 4), ("gradient", 4), ("optimizer", 8)):
        assert found.part(name) == pytest.approx(each * largest, abs=each)
    assert found.part("logits") == whole.part("logits")
    assert found.part("activations") == pytest.approx(
        3 * stages * largest / whole.parameters * whole.part("activations"), rel=1e-3
    )


def test_a_line_carries_what_the_recipe_says_of_a_value(folder: Path) -> None:
    exact = plan_stages(recipe(), folder, 2).sent
    quantised = recipe("activation_bits=4")

    assert exact == pytest.approx(32 * 8, rel=0.06)  # a row of 32 numbers each way, 4 bytes each
    assert plan_stages(quantised, folder, 2).sent == pytest.approx(exact * 12 / 64)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_layers_are_divided_among_machines_that_have_the_memory(folder: Path, stages: int) -> None:
    """Equal machines need what the plan says of the fullest one, and with a little less they do not do."""
    whole = plan_memory(recipe(), folder, 1, Machine(1 << 40))
    division = StageMemory(recipe(), folder, whole)
    need = whole.bytes if stages == 1 else plan_stages(recipe(), folder, stages).memory(whole).bytes

    found = division.divide([need + whole.part("logits")] * stages)
    assert found is not None
    assert [layer for layers in found for layer in layers] == list(range(LAYERS))
    assert max(division.memory(stages, n, layers) for n, layers in enumerate(found)) == pytest.approx(
        need, rel=0.1
    )
    assert division.divide([int(0.8 * need)] * stages) is None


def test_the_layers_of_a_stronger_machine_are_more_and_each_has_the_memory_for_its_own(folder: Path) -> None:
    division = StageMemory(recipe(), folder, plan_memory(recipe(), folder, 1, Machine(1 << 40)))
    memories = [
        division.memory(3, 0, range(1)),
        division.memory(3, 1, range(4)),
        division.memory(3, 2, range(1)),
    ]

    assert division.divide(memories) == (range(0, 1), range(1, 5), range(5, 6))
    assert division.divide([memories[0], memories[1] - 1, memories[2]]) is None


def test_more_machines_than_layers_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="8 machines are more than this model has layers for"):
        plan_stages(recipe(), folder, LAYERS + 2)
