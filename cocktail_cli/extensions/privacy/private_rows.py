"""Differentially private gradients of a peer's own rows (DP-SGD, Abadi et al., 2016), and a swarm of them.

    a step   takes each row with probability q = batch_size / rows (Poisson sampling)
             clips the gradient of each row to C = max_row_norm, and adds them up
             adds noise of N(0, (sigma C)^2) to each coordinate, divides by batch_size, steps the optimizer

What a peer sends follows from such gradients alone: the hub is not trusted, the noise is this machine's.
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from msgspec import msgpack
from msgspec.structs import replace
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

import cocktail_cli
from cocktail_cli.assembly import PeerExtension
from cocktail_cli.errors import Failure
from cocktail_cli.machine import default_peer_name
from recipes.config import Recipe
from recipes.training import Lease, ModelExtension, Peer
from transport.protocol import messages

from .budget import Budget, check_accountant, path_of
from .hub import NAME, Spent, words
from .keys import Keys

SHARE = 0.5  # of a model's parameters that may be trained: beyond it the noise drowns what is learnt
MORE = 1.05  # steps that a run may take for each of its own: a lease that is lost is computed again
INSTEAD = "cocktail_cli.join_privately(RUN_URL, model, optimizer, PrivateRows(rows, loss_of, batch_size))"


class Rows(Protocol):
    """Rows that can be drawn by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> Any: ...


class RowGradients:
    """Computes the gradient of each row by itself: `loss_of` never sees two, so none has a part in another's.

    Rows of one shape are computed together by `torch.func.vmap`, where the model can be; else one by one.
    """

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor]) -> None:
        self.whole, self.together = _Whole(model, loss_of), True
        self.trained = {name: p for name, p in self.whole.named_parameters() if p.requires_grad}

    def of(self, rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Compute gradients (n, P), in the order of the model's trained parameters, and losses (n,)."""
        if self.together and len(rows) > 1:
            try:
                stacked = default_collate(list(rows))
            except RuntimeError:  # of several shapes
                return self._each(rows)
            try:
                return self._at_once(stacked)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:  # an error of the user's own comes again, row by row
                self.together = False
                why = str(error).partition("\n")[0][:200]
                warnings.warn(f"rows are computed one by one, as vmap cannot: {why}", stacklevel=2)
        return self._each(rows)

    def _at_once(self, stacked: Any) -> tuple[Tensor, Tensor]:
        def loss(named: Mapping[str, Tensor], row: Any) -> Tensor:
            return functional_call(self.whole, dict(named), (row,))  # type: ignore[no-any-return]

        each = vmap(grad_and_value(loss), in_dims=(None, 0), randomness="different")
        found, losses = each({name: p.detach() for name, p in self.trained.items()}, stacked)
        return torch.cat([found[name].flatten(1) for name in self.trained], 1), losses

    def _each(self, rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
        gradients, losses = [], []
        for row in rows:
            loss = self.whole(tree_map(lambda leaf: leaf[0], default_collate([row])))
            parts = torch.autograd.grad(loss, [*self.trained.values()], materialize_grads=True)
            gradients.append(torch.cat([part.flatten() for part in parts]))
            losses.append(loss.detach())
        return torch.stack(gradients), torch.stack(losses)


class _Whole(nn.Module):
    """The model with the loss of a row: what `functional_call` can call."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, row: Any) -> Tensor:
        loss = self.loss_of(self.model, row)
        if loss.shape != ():
            said = f"loss_of returned a tensor of shape {tuple(loss.shape)}, expected a number"
            hints = ("loss_of(model, row) is the loss of one row, which has no batch dimension",)
            raise Failure("usage", said, hints=hints)
        return loss


@dataclass(eq=False)
class PrivateRows(ModelExtension):
    """Rows of this machine, each a record that is protected.

    Args:
        rows: with `len(rows)` and `rows[i]`: tensors and numbers, in tuples and dicts.
        loss_of: computes the loss of one row, which has no batch dimension: `loss_of(model, row)`.
        batch_size: rows of a step, on average.
        at_once: rows whose gradients are in memory together.
    """

    rows: Rows
    loss_of: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    at_once: int = 16

    name = NAME
    peer: str = field(default="", init=False)  # whose rows they are in the run
    budget: Budget | None = field(default=None, init=False)  # once the run is joined

    def check(self, model: nn.Module) -> None:
        """Raise Failure where rows cannot be drawn at random, or the model has no gradient of each."""
        if not (hasattr(self.rows, "__len__") and hasattr(self.rows, "__getitem__")):
            said = f"rows come from a {type(self.rows).__name__}, which draws them in its own order"
            hints = ("the data set itself, with len(rows) and rows[i]: each step draws rows at random",)
            raise Failure("usage", said, hints=hints)
        for name, most in (("batch_size", len(self.rows)), ("at_once", math.inf)):
            if not hasattr(value := getattr(self, name), "__index__") or not 1 <= value <= most:
                hints = ("batch_size: rows of a step on average; at_once: rows in memory together",)
                raise Failure("usage", f"{name} {value!r} of {len(self.rows):,} rows", hints=hints)
        if not callable(self.loss_of):
            hints = ("loss_of(model, row) computes the loss of one row",)
            raise Failure("usage", f"loss_of is a {type(self.loss_of).__name__}", hints=hints)
        mixing = [name for name, one in model.named_modules() if isinstance(one, _BatchNorm) and one.training]
        if mixing:
            said = f"{mixing[0]} is batch normalization, which mixes rows: no row has a gradient of its own"
            raise Failure("usage", said, hints=("LayerNorm or GroupNorm; or .eval() of that layer",))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        if trained > SHARE * (every := sum(p.numel() for p in model.parameters())):
            said = f"the model trains {trained:,} of its {every:,} parameters, and noise grows with each"
            raise Failure("usage", said, hints=("train adapters (LoRA), and freeze the rest",))

    def begin(self, terms: Keys, steps: int, run: str) -> None:
        """Open the budget of these rows in a run of so many steps. Raises Failure where none is left."""
        if self.budget is not None:  # of an earlier session
            return
        if terms.delta >= 1 / (count := len(self.rows)):
            said = f"privacy.delta {terms.delta:g} of the run permits to publish one of {count:,} rows"
            raise Failure("rejected", said, hints=(f"a delta below {1 / count:.1g}, or more rows",))
        budget = Budget(path_of(run, self.peer), terms, self.batch_size / count, steps)
        if budget.spent:
            budget.close()
            spent = f"{words(budget.epsilon, terms)}, in {budget.steps:,} steps"
            said = f"the privacy budget of these rows is spent: {spent}"
            raise Failure("rejected", said, hints=("a run of a larger epsilon",))
        self.budget = budget

    def drawn(self, generator: torch.Generator) -> Iterator[list[Any]]:
        """Draw each row with the same probability, independently; yield them in parts."""
        chances = torch.rand(len(self.rows), dtype=torch.float64, generator=generator)
        chosen = (chances < self.batch_size / len(self.rows)).nonzero().flatten().tolist()
        for start in range(0, len(chosen), self.at_once):
            yield [self.rows[at] for at in chosen[start : start + self.at_once]]

    def gradient(
        self, of: RowGradients, clip: float, noise: float, generator: torch.Generator
    ) -> tuple[Tensor, float]:
        """Compute the noisy mean (P,) of the clipped gradients of a draw, and its mean loss, which is secret.

        Args:
            noise: sigma, in units of `clip`.
            generator: of the draw and of the noise; who knows its seed can take the noise away.
        """
        first = next(iter(of.trained.values()))
        total = torch.zeros(sum(p.numel() for p in of.trained.values()), device=first.device)
        losses = list[float]()
        for part in self.drawn(generator):
            each, found = of.of(part)
            norms = each.norm(dim=1)
            each[~norms.isfinite()] = 0.0
            total += (clip / norms).clamp(max=1.0).nan_to_num(0.0) @ each
            losses += found[found.isfinite()].tolist()
        total += (noise * clip * torch.randn(len(total), generator=generator)).to(total.device)
        return total / self.batch_size, sum(losses) / max(1, len(losses))

    def report(self, delivered: Sequence[Lease]) -> bytes:
        return b"" if self.budget is None else msgpack.encode(Spent(self.budget.epsilon))

    def close(self) -> None:
        """Let others spend the budget."""
        if self.budget is not None:
            self.budget.close()
            self.budget = None


class BudgetSpent(Exception):
    """The budget is spent: the block of `join_privately` ends with it in good order."""


def join_privately(
    url: str,
    model: nn.Module,
    optimizer: Optimizer,
    rows: PrivateRows,
    evaluate: Callable[[nn.Module], float] | None = None,
    name: str | None = None,
) -> PrivateSwarm:
    """Join a run with `privacy:`, to train adapters on rows of this machine; a context manager.

    Args:
        evaluate, name: as `join_with`. What `evaluate` returns is sent as it is: measure public rows.

    Raises Failure where rows or model cannot take part.
    """
    check_accountant()
    if not isinstance(rows, PrivateRows):
        raise Failure("usage", f"rows is a {type(rows).__name__}, expected PrivateRows", hints=(INSTEAD,))
    rows.check(model)
    rows.peer = name or default_peer_name()
    return PrivateSwarm(cocktail_cli.join_with(url, model, optimizer, evaluate, rows.peer), model, rows)


class PrivateSwarm:
    """A run that takes part in nothing but private gradients. Its methods are for the thread that made it.

    Args:
        swarm: of `join_with`.
    """

    def __init__(self, swarm: Any, model: nn.Module, rows: PrivateRows) -> None:
        self._swarm, self._rows, self._stack = swarm, rows, ExitStack()
        self._gradients = RowGradients(model, rows.loss_of)
        self._secret, self._why = torch.Generator().manual_seed(secrets.randbits(63)), ""
        swarm.use(rows)

    def __enter__(self) -> PrivateSwarm:
        with ExitStack() as stack:
            stack.callback(self._rows.close)
            stack.enter_context(self._swarm)
            if self._rows.budget is None:
                hints = ("join_with joins it; or launch with privacy.epsilon=8",)
                raise Failure("rejected", "this run has no section `privacy:`", hints=hints)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> bool:
        ended = self._stack.__exit__(kind, *error)
        return bool(ended) or (kind is not None and issubclass(kind, BudgetSpent))

    @property
    def reason(self) -> str:
        """Return why the run is over for this peer; empty: it is not."""
        return self._why or str(self._swarm.reason)

    @property
    def epsilon(self) -> float:
        """Return what is spent of the budget."""
        return self._budget.epsilon

    @property
    def _budget(self) -> Budget:
        if self._rows.budget is None:
            hints = ("with join_privately(...) as swarm:",)
            raise Failure("usage", "the run is not joined, or was left", hints=hints)
        return self._rows.budget

    def step(self) -> Any:
        """Draw rows, and step the optimizer by their private gradient; return as `Swarm.step`.

        The block ends with the run, or once the budget is spent.
        """
        budget = self._budget
        if budget.spent:
            self._why = f"privacy budget spent: {words(budget.epsilon, budget.terms)}"
            self._swarm.leave(self._why)
            raise BudgetSpent(self._why)
        budget.spend()
        gradient, loss = self._rows.gradient(
            self._gradients, budget.terms.max_row_norm, budget.noise, self._secret
        )
        trained = [*self._gradients.trained.values()]
        views = torch.split(gradient, [p.numel() for p in trained])
        for parameter, view in zip(trained, views, strict=True):
            parameter.grad = view.view_as(parameter)  # what the user has left there was not clipped
        return self._swarm.step(loss, self._rows.batch_size)

    def leave(self) -> None:
        """Leave after the exchange under way."""
        self._swarm.leave()


# ---- between this peer and its hub -------------------------------------------------------------------------


class PrivatePeer(PeerExtension):
    """Opens the budget before anything is computed, and refuses a loop that draws rows itself."""

    name = NAME

    def __init__(self, recipe: Recipe, run: str) -> None:
        self.recipe, self.run = recipe, run
        self.rows: PrivateRows | None = None

    def changed(self, report: messages.Report) -> messages.Report:
        """Leave out the loss of rows, which is not private."""
        return replace(report, loss_sum=0.0, tokens=0)

    def built(self, files: Mapping[str, Path], peer: Peer) -> None:
        """Begin to spend. Raises Failure where the loop is not private."""
        rows = next((one for one in peer.trainer.extensions if isinstance(one, PrivateRows)), None)
        if rows is None:
            said = (
                "this run's rows are private: a loop that draws its own batches and adds no noise is refused"
            )
            raise Failure("rejected", said, hints=(INSTEAD,))
        terms = self.recipe.extensions[NAME]
        assert isinstance(terms, Keys)
        steps = math.ceil(MORE * self.recipe.training.max_steps) + 2
        rows.begin(terms, steps, self.run)
        self.rows = rows

    def farewell(self) -> str:
        if self.rows is None or self.rows.budget is None:
            return ""
        budget = self.rows.budget
        return f"privacy of each row: {words(budget.epsilon, budget.terms)} spent, in {budget.steps:,} steps"
