"""Fused kernels are used where losses stay the same; stand-ins for a package that only a GPU can run."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from tiny_models import COMMON, WIDTH
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from recipes.models.fused_kernels import same_losses, small_config

CONFIG = small_config(LlamaConfig(**COMMON, **WIDTH, attention_dropout=0.5))
Patch = Callable[[PreTrainedModel], None]


def changed_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Patch:
    """A patch of a model whose logits are changed on their way to the loss."""

    def patch(model: Any) -> None:
        head = model.lm_head
        plain = type(head).forward
        head.forward = MethodType(lambda self, hidden: change(plain(self, hidden)), head)

    return patch


def replaced_function(model: PreTrainedModel) -> None:
    modeling_llama.apply_rotary_pos_emb = lambda q, k, cos, sin, *_, **__: (k, q)


def broken(model: PreTrainedModel) -> None:
    raise RuntimeError("no kernel image is available for execution on the device")


def fused_in_float32(model: Any) -> None:
    """Norms of a fused kernel compute in float32 and round once."""
    for layer in model.model.layers:
        norm = layer.input_layernorm
        norm.forward = MethodType(
            lambda self, x: torch.nn.functional.rms_norm(
                x.float(), x.shape[-1:], self.weight.float(), self.variance_epsilon
            ).to(x.dtype),
            norm,
        )


@pytest.mark.parametrize(
    ("patch", "same"),
    [
        (lambda model: None, True),
        (fused_in_float32, True),
        (changed_loss(lambda logits: logits * 1.01), False),
        (changed_loss(lambda logits: logits + 0.1 * (logits - logits.detach())), False),  # the gradient alone
        (replaced_function, False),
        (broken, False),
    ],
    ids=["none", "rounds once", "other loss", "other gradient", "other function", "does not run"],
)
def test_kernels_are_used_where_the_losses_before_and_after_a_step_are_those_of_the_plain_model(
    patch: Patch, same: bool
) -> None:
    before, state = dict(vars(modeling_llama)), torch.get_rng_state()

    assert same_losses(LlamaForCausalLM, CONFIG, "cpu", patch) is same
    assert vars(modeling_llama) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_class_is_tried_once_and_a_small_model_of_it_has_one_layer() -> None:
    tries = []
    for _ in range(2):
        assert same_losses(LlamaForCausalLM, CONFIG, "cpu", tries.append) is True
    (first, second) = tries

    assert first.config.num_hidden_layers == 1
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
