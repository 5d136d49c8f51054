"""Muon and SOAP: they take hidden matrices, leave the rest to AdamW, and their state is kept and counted."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from recipes.config import Recipe, load_recipe
from recipes.training import (
    SingleDeviceTrainer,
    build_optimizer,
    embeddings_of,
    optimizer_bytes,
    parameters_of,
    set_learning_rate,
    step_flops,
)
from recipes.training.optimizers import EVERY, LONGEST, Soap, matrix_numbers

METHODS = ["muon", "soap"]
SHAPE = (5, 5)


def recipe(optim: str, *more: str) -> Recipe:
    return load_recipe("smoke", [f"optim={optim}", "learning_rate=1e-2", *more])


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=48, max_position_embeddings=16, **sizes))


def trainer(optim: str, *more: str) -> SingleDeviceTrainer:
    return SingleDeviceTrainer(model(), recipe(optim, *more))


def take_steps(local: SingleDeviceTrainer, count: int, start: int = 0) -> torch.Tensor:
    for step in range(start, start + count):
        drawn = torch.Generator().manual_seed(step)
        local.flat.grad.copy_(torch.randn(local.layout.size, generator=drawn))
        local.step(1e-2, 0.1)
    return local.flat.vector.clone()


def test_embeddings_head_norms_and_biases_are_left_to_adamw() -> None:
    made = model()
    names = [name for name, _ in made.named_parameters()]
    shapes = [p.shape for p in made.parameters()]
    taken = {names[n] for n in matrix_numbers(shapes, embeddings_of(made))}

    assert {name.rsplit(".", 2)[-2] for name in taken} == {
        "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h",
    }  # fmt: skip
    assert all(name.endswith("weight") for name in taken)


@pytest.mark.parametrize("optim", METHODS)
def test_state_that_is_kept_and_restored_goes_on_as_if_nothing_had_happened(optim: str) -> None:
    first, second = trainer(optim), trainer(optim)
    take_steps(first, 12)
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()})

    assert torch.equal(take_steps(first, 12, 12), take_steps(second, 12, 12))


@pytest.mark.parametrize("optim", METHODS)
def test_the_bytes_of_state_are_those_that_plan_counts(optim: str) -> None:
    local = trainer(optim)
    take_steps(local, 1)
    held = sum(
        value.nbytes
        for state in local.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )

    assert held == optimizer_bytes(optim, local.layout.shapes, embeddings_of(local.model))


@pytest.mark.parametrize("optim", METHODS)
def test_the_products_of_a_step_are_those_that_plan_counts(optim: str) -> None:
    """Over the steps between two refreshes; torch's counter leaves out SOAP's QR."""
    local = trainer(optim)
    take_steps(local, 1)
    with FlopCounterMode(display=False) as counter:
        for _ in range(EVERY):
            local.optimizer.step()
    embeddings = embeddings_of(local.model)
    sides = [s for n in matrix_numbers(local.layout.shapes, embeddings) for s in local.layout.shapes[n]]
    qr = 8 / 3 * sum(side**3 for side in sides) if optim == "soap" else 0

    planned = EVERY * step_flops(optim, local.layout.shapes, embeddings)

    assert planned == pytest.approx(counter.get_total_flops() + qr)
    assert step_flops("adamw_torch", local.layout.shapes, embeddings) == 0


@pytest.mark.parametrize("optim", METHODS)
def test_half_precision_weights_are_stepped_by_the_same_rule(optim: str) -> None:
    """A window of parameters at a time has a gradient."""
    local = trainer(optim, "dtype=bfloat16")
    before = local.flat.vector.clone()
    after = take_steps(local, 2)

    bounds = zip(local.layout.offsets, local.layout.offsets[1:], strict=False)
    assert all(not torch.equal(before[start:stop], after[start:stop]) for start, stop in bounds)


@pytest.mark.parametrize("optim", METHODS)
def test_a_rate_is_set_for_both_parts_and_beta1_for_all_that_have_it(optim: str) -> None:
    """Muon's momentum is not divided among the peers."""
    optimizer = trainer(optim).optimizer
    set_learning_rate(optimizer, 0.5, beta1=0.125)

    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    with_betas = [group["betas"] for group in optimizer.param_groups if "betas" in group]
    assert {beta1 for beta1, _ in with_betas} == {0.125}
    assert (len(with_betas) == len(optimizer.param_groups)) == (optim == "soap")
    assert len(parameters_of(optimizer)) == len(list(model().parameters()))


def test_soap_with_a_basis_that_is_the_identity_is_adam() -> None:
    """Where gradients are diagonal the eigenvectors are the coordinates."""
    training = recipe("soap", "adam_beta1=0.9", "adam_beta2=0.99").training
    weight, plain = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    soap = Soap([{"params": [weight]}], training)
    adam = torch.optim.AdamW([plain], lr=training.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(30):
        drawn = torch.Generator().manual_seed(step)
        weight.grad = torch.diag(torch.tensor([8.0, 4.0, 2.0, 1.0]) * (1 + torch.rand(4, generator=drawn)))
        plain.grad = weight.grad.clone()
        soap.step()
        if step:  # the first gradient makes the basis alone
            adam.step()

    torch.testing.assert_close(weight.diag(), plain.diag(), rtol=1e-4, atol=1e-5)


def test_soap_is_the_same_in_rotated_coordinates() -> None:
    """Adam is not: that is what the eigenbasis is for."""
    training = recipe("soap").training
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(9)))[0]
    one, other = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(SHAPE))
    left, right = Soap([{"params": [one]}], training), Soap([{"params": [other]}], training)
    scale = torch.arange(1.0, 6.0)[:, None]
    for step in range(25):
        grad = scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        one.grad, other.grad = grad, turn @ grad
        left.step()
        right.step()

    assert one.abs().max() > 0.01
    torch.testing.assert_close(turn @ one, other, rtol=1e-3, atol=1e-4)


def test_a_long_side_has_no_basis() -> None:
    wide = nn.Parameter(torch.zeros(2, LONGEST + 1))
    soap = Soap([{"params": [wide]}], recipe("soap").training)
    wide.grad = torch.ones_like(wide)
    soap.step()

    assert set(soap.state[wide]) == {"step", "exp_avg", "exp_avg_sq", "left.covariance", "left.basis"}
    assert wide.isfinite().all()


def test_muon_moves_a_matrix_by_an_orthogonal_one() -> None:
    made = recipe("muon", "weight_decay=0")
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = build_optimizer([weight], made.training)
    weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    values = torch.linalg.svdvals(weight) / (0.2 * 8**0.5 * made.training.learning_rate)

    assert values.min() > 0.5
    assert values.max() < 1.5


def test_a_recipe_that_names_neither_has_the_hash_that_it_had() -> None:
    assert "momentum: " not in load_recipe("smoke").to_json().replace("outer_momentum", "")
