"""Gradients of rows: each by itself, clipped, with noise; and what they tell of a row that was trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_peer import Row, adapted, loss_of, rows_like
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.privacy import PrivateRows
from cocktail_cli.extensions.privacy.private_rows import RowGradients

LARGE = 1e6  # a norm that clips nothing


def plain(model: nn.Module, row: Row) -> Tensor:
    """The gradient of one row, by autograd."""
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = cross_entropy(model(row[0]), torch.tensor(row[1]))
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, trained)])


def test_rows_that_are_computed_together_have_the_gradients_that_each_has_alone() -> None:
    model, rows = adapted(), rows_like(5)
    each = RowGradients(model, loss_of)

    found, losses = each.of(rows)

    assert each.together
    torch.testing.assert_close(found, torch.stack([plain(model, row) for row in rows]))
    assert losses.shape == (5,)


def test_a_model_that_vmap_cannot_compute_is_computed_row_by_row() -> None:
    def loss(model: nn.Module, row: Any) -> Tensor:
        return loss_of(model, row) * (2.0 if row[0].sum().item() > 0 else 1.0)  # depends on its data

    model, rows = adapted(), rows_like(5)
    each = RowGradients(model, loss)

    with pytest.warns(UserWarning, match="one by one, as vmap cannot"):
        found, _ = each.of(rows)

    wanted = [plain(model, row) * (2.0 if row[0].sum() > 0 else 1.0) for row in rows]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_rows_of_several_lengths_need_no_padding() -> None:
    """And those of one length are computed together afterwards."""

    def loss(model: nn.Module, row: Tensor) -> Tensor:
        return model(row.mean(0)).square().sum()

    model = adapted()
    each = RowGradients(model, loss)
    rows = [torch.ones(length, 8) for length in (1, 2, 3)]

    found, _ = each.of(rows)

    assert each.together
    torch.testing.assert_close(found[0], found[2])


def test_a_loss_of_several_numbers_is_one_error() -> None:
    each = RowGradients(adapted(), lambda model, row: model(row[0]))

    with pytest.raises(Failure, match=r"a tensor of shape \(2,\), expected a number"):
        each.of(rows_like(1))


def test_no_row_counts_more_than_the_norm_and_one_that_is_not_finite_counts_nothing() -> None:
    """All rows are drawn (a batch of all), without noise."""
    model = adapted()
    rows = [*rows_like(3), (torch.full((8,), torch.nan), 0)]
    each, generator = RowGradients(model, loss_of), torch.Generator().manual_seed(1)

    found, _ = PrivateRows(rows, loss_of, 4).gradient(each, 0.1, 0.0, generator)

    clipped = [0.1 * one / one.norm() for one in (plain(model, row) for row in rows[:3])]
    assert all(plain(model, row).norm() > 0.1 for row in rows[:3])
    torch.testing.assert_close(found, sum(clipped) / 4)


def test_noise_has_the_deviation_that_was_asked_for_whatever_rows_are_drawn() -> None:
    model = adapted(width=2000)
    rows = PrivateRows(rows_like(50), lambda model, row: 0.0 * loss_of(model, row), 5)

    found, _ = rows.gradient(RowGradients(model, rows.loss_of), 2.0, 3.0, torch.Generator().manual_seed(1))

    assert float(found.std()) == pytest.approx(3.0 * 2.0 / 5, rel=0.05)


def test_each_row_is_drawn_with_the_same_probability_by_itself() -> None:
    """Poisson sampling: the number of rows varies as a binomial does."""
    rows, generator = PrivateRows(range(100), loss_of, 20, at_once=7), torch.Generator().manual_seed(1)
    draws = [[row for part in rows.drawn(generator) for row in part] for _ in range(2000)]

    counts = torch.tensor([len(draw) for draw in draws], dtype=torch.float64)
    assert float(counts.mean()) == pytest.approx(20, rel=0.02)
    assert float(counts.var()) == pytest.approx(100 * 0.2 * 0.8, rel=0.1)
    often = torch.bincount(torch.tensor([row for draw in draws for row in draw]), minlength=100) / 2000
    assert float((often - 0.2).abs().max()) < 0.04


# ---- a membership test -------------------------------------------------------------------------------------

CANARY = (torch.tensor([1.0, 1, 1, -1, 1, -1, 1, -1]), 0)  # a row of the other kind, with a wrong label
ROWS, BATCH, STEPS, RATE, MODELS = 64, 16, 20, 2.0, 40


def canary_loss(seed: int, member: bool, clip: float, noise: float) -> float:
    """The loss at the canary of a model that has trained on it, or on another row in its place."""
    model = adapted(width=64)
    rows = [*rows_like(ROWS - 1, 1000 + seed), CANARY if member else rows_like(1, 5000 + seed)[0]]
    private, each = PrivateRows(rows, loss_of, BATCH, at_once=ROWS), RowGradients(model, loss_of)
    generator, trained = torch.Generator().manual_seed(2 * seed + member), [*each.trained.values()]
    for _ in range(STEPS):
        gradient, _ = private.gradient(each, clip, noise, generator)
        with torch.no_grad():
            for parameter, part in zip(trained, gradient.split([p.numel() for p in trained]), strict=True):
                parameter -= RATE * part.view_as(parameter)
    return float(loss_of(model, (CANARY[0], torch.tensor(CANARY[1]))).detach())


def auc(clip: float, noise: float) -> float:
    """How often a model that has seen the canary has less loss at it than one that has not."""
    members, others = (
        torch.tensor([canary_loss(seed, member, clip, noise) for seed in range(MODELS)])
        for member in (True, False)
    )
    return float((members[:, None] < others).float().mean())


@pytest.mark.slow
def test_a_membership_test_finds_a_canary_without_privacy_and_not_with_epsilon_2() -> None:
    from opacus.accountants.utils import get_noise_multiplier

    noise = get_noise_multiplier(target_epsilon=2, target_delta=1e-6, sample_rate=BATCH / ROWS, steps=STEPS)

    assert auc(LARGE, 0.0) >= 0.8
    assert auc(1.0, noise) <= 0.6
