"""A frozen layer with a trained one behind it, rows for it, and the loop of a peer whose rows are private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cocktail_cli.extensions.privacy import PrivateRows, join_privately

Row = tuple[Tensor, int]


def adapted(seed: int = 0, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(8, width).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(width, 2))


def rows_like(count: int = 200, seed: int = 1) -> list[Row]:
    """Rows of two kinds, which a direction tells apart."""
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return [(row, int(row[:3].sum() > 0)) for row in inputs]


def loss_of(model: nn.Module, row: Any) -> Tensor:
    return cross_entropy(model(row[0]), row[1])


def train(
    url: object,
    rows: PrivateRows | None = None,
    model: nn.Module | None = None,
    each: Callable[[Any], None] = lambda _: None,
    name: str = "ann",
) -> tuple[nn.Module, Any]:
    """Train as a volunteer does, until the block ends."""
    model, rows = model or adapted(3), rows or PrivateRows(rows_like(), loss_of, 20)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    with join_privately(str(url), model, optimizer, rows, name=name) as swarm:
        while True:
            swarm.step()
            each(swarm)
    return model, swarm
