"""The loss in slices: equal to the loss over all logits, for heads of every kind, and small in memory."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import COMMON, CONFIGS, WIDTH

from recipes.config import Lora
from recipes.data import Sample, collate
from recipes.models import add_adapters
from recipes.objectives import can_slice, logits_of, loss_sum, uses_liger

HEADS: dict[str, Any] = CONFIGS | {
    "gemma2": lambda: transformers.Gemma2Config(  # soft capping after the head
        **COMMON, **WIDTH, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0
    ),
    "granite": lambda: transformers.GraniteConfig(**COMMON, **WIDTH, logits_scaling=3.0),
    "cohere": lambda: transformers.CohereConfig(**COMMON, **WIDTH, logit_scale=0.3),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, **WIDTH, num_key_value_heads=1, num_local_experts=2
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=2),
}
ONE_ROW = 4 * 320  # bytes of a slice of one token


def model_of(kind: str) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(HEADS[kind]()).float().eval()  # no dropout


def batch_of(*lengths: int) -> dict[str, torch.Tensor]:
    drawn = np.random.default_rng(5)
    rows = [
        Sample(drawn.integers(0, 320, length).astype(np.int32), np.arange(length) > 1) for length in lengths
    ]
    return collate(rows)


def reference(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy as textbooks have it, over the logits of all tokens."""
    scores = logits_of(model, batch)[:, :-1].reshape(-1, 320)
    return torch.nn.functional.cross_entropy(scores, batch["labels"][:, 1:].reshape(-1), reduction="sum")


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained, allow_unused=True)  # an adapter may be unused, an expert too
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_slices_have_the_loss_and_the_gradient_of_the_whole(kind: str, rows: int) -> None:
    model, batch = model_of(kind), batch_of(5, 12, 9)
    assert can_slice(model)

    expected = reference(model, batch)
    loss, tokens = loss_sum(model, batch, rows * ONE_ROW)

    assert tokens == int((batch["labels"][:, 1:] != -100).sum())
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    theirs, ours = gradients(model, expected), gradients(model, loss)
    assert float((ours - theirs).norm()) <= 1e-6 * float(theirs.norm())


def test_slices_of_adapters_and_without_gradients() -> None:
    model, batch = add_adapters(model_of("llama"), Lora(lora_dropout=0.0)), batch_of(5, 12)

    expected = reference(model, batch)
    loss, _ = loss_sum(model, batch, 4 * ONE_ROW)
    with torch.no_grad():
        evaluated, _ = loss_sum(model, batch, 4 * ONE_ROW)

    assert float(loss.detach()) == float(evaluated) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert torch.allclose(gradients(model, loss), gradients(model, expected), rtol=1e-4, atol=1e-6)


def test_the_model_is_left_as_it_was_also_after_an_error() -> None:
    model, batch = model_of("llama"), batch_of(5, 12)

    loss_sum(model, batch, ONE_ROW)[0].backward()
    with pytest.raises((IndexError, RuntimeError)):
        loss_sum(model, batch | {"input_ids": batch["input_ids"] + 1000}, ONE_ROW)

    assert "forward" not in model.__dict__
    assert "forward" not in model.get_decoder().__dict__
    assert not model.get_decoder()._forward_hooks
    assert logits_of(model, batch).shape == (2, 12, 320)


def test_ligers_fused_loss_gets_the_labels_and_is_the_same_sum() -> None:
    """Without the labels, liger-kernel computes all logits and fuses nothing."""
    liger = pytest.importorskip("transformers.integrations.liger")
    pytest.importorskip("liger_kernel")
    model, batch = model_of("llama"), batch_of(5, 12, 9)
    expected = reference(model, batch)

    names = ("rms_norm", "swiglu", "rope", "cross_entropy")  # Triton's interpreter cannot run all of these
    liger.apply_liger_kernel(model, dict.fromkeys(names, False) | {"fused_linear_cross_entropy": True})
    loss, tokens = loss_sum(model.train(), batch)

    assert uses_liger(model)
    assert model(**batch).logits is None  # so there were no logits
    assert tokens == int((batch["labels"][:, 1:] != -100).sum())
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
