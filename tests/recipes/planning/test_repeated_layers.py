"""A pass through all layers of a model is what few of them say, to the byte, for every class and setting."""

from typing import Any

import pytest
import torch
import transformers
from tiny_models import CLASSES, GROUPED, WIDTH
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.config import Lora
from recipes.models import add_adapters
from recipes.objectives import causal_model
from recipes.planning.activations import MicroBatch, move, repeated_layers, repetition, trace, trace_pass

# the fewest of which not all are traced: one layer in two has full attention, one in six
LAYERS = {"gemma2": 8, "gemma3": 24}
ALIKE, PAIRS = 6, 8  # where all are alike, and where two kinds take turns
MORE: dict[str, Any] = {
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=16),  # sliding and full attention
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=8),
    "a large vocabulary": lambda: transformers.LlamaConfig(**GROUPED | {"vocab_size": 9000}),
}
KINDS = CLASSES | MORE


def model_of(kind: str, layers: int = 0, **more: Any) -> Any:
    config = KINDS[kind]()
    config.num_hidden_layers = layers or LAYERS.get(kind, ALIKE)
    wanted = config.to_dict() | {"layer_types": None, **more}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(type(config)(**wanted))


def all_layers(model: Any, half: torch.dtype | None = None) -> MicroBatch:
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(model, {})
        return trace_pass(model, 2, 32, half)


def few_layers(model: Any, half: torch.dtype | None = None) -> MicroBatch:
    """Trace, and see that the last layer never runs."""
    ran: list[object] = []
    repeated = repeated_layers(causal_model(model))
    assert repeated is not None
    hook = repeated.layers[-1].register_forward_hook(lambda *_: ran.append(True))
    found = trace(model, 2, 32, half)
    hook.remove()
    assert not ran
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_few_layers_say_what_all_of_a_class_take(kind: str) -> None:
    assert few_layers(model_of(kind)) == all_layers(model_of(kind))


def test_a_pass_through_experts_in_bfloat16_takes_half_of_one_in_float32() -> None:
    """Fake tensors of torch multiply groups in bfloat16 only."""
    whole = all_layers(model_of("qwen3_moe", 2))
    half = all_layers(model_of("qwen3_moe", 2).to(torch.bfloat16))

    assert half.flops == whole.flops
    assert whole.flops > all_layers(model_of("qwen3_moe", 2, moe_intermediate_size=8)).flops
    assert 0.4 < half.kept / whole.kept < 0.7


@pytest.mark.parametrize("kind", ["gpt_neox", "gemma2"])
@pytest.mark.parametrize(("every", "adapters"), [(0, True), (1, True), (2, False)])
def test_also_with_adapters_checkpoints_and_autocast(kind: str, every: int, adapters: bool) -> None:
    """`every`: so many layers have one checkpoint, 0: none."""

    def made() -> Any:
        model = model_of(kind, PAIRS if every == 2 else 0)
        if every:
            model.activation_checkpointing_enable(every_n_layers=every)
        return add_adapters(model, Lora(lora_r=4)) if adapters else model

    assert few_layers(made(), torch.bfloat16) == all_layers(made(), torch.bfloat16)


def test_layers_that_repeat_nowhere_are_all_traced() -> None:
    """Each has its own size, so there is nothing to leave out."""
    model = model_of("llama", 8)
    for place, layer in enumerate(model.model.layers):
        layer.mlp.gate_proj = torch.nn.Linear(32, 64, bias=place in (0, 1, 3, 6), device="meta")

    assert repeated_layers(model) is None
    assert trace(model, 2, 32).flops > 0


def test_the_model_and_its_config_are_as_before() -> None:
    model = model_of("gemma2")
    kinds = list(model.config.layer_types)

    few_layers(model)

    assert model.config.num_hidden_layers == len(model.model.layers) == LAYERS["gemma2"]
    assert model.config.layer_types == kinds


@pytest.mark.parametrize(
    ("kinds", "few", "period"),
    [
        ("aaaaaaaa", 2, 1),
        ("abababab", 2, 2),
        ("ababababa", 3, 2),
        ("caaaaaaa", 2, 1),
        ("aaaaabaaaaabaaaaabaa", 8, 6),
        ("abcdefgh", 8, 1),
    ],
)
def test_few_begin_and_end_as_all_do(kinds: str, few: int, period: int) -> None:
    found = repetition(kinds)

    assert found == (few, period)
    whole = kinds[:few] + kinds[few - period : few] * ((len(kinds) - few) // period)
    assert whole == kinds


def test_a_large_vocabulary_does_not_decide_the_memory_of_a_step() -> None:
    """4 x 1,024 tokens of a vocabulary of 150,000: 2.4 GB of logits in float32, and three such buffers."""
    config = transformers.LlamaConfig(**WIDTH | {"vocab_size": 150_000, "num_key_value_heads": 1})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    traced = trace(model, 4, 1024)

    assert traced.most - traced.kept < 700e6
