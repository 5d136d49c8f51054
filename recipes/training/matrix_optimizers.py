"""Optimizers that take a weight as the matrix it is: Muon, and Adam in Shampoo's eigenbasis (SOAP).

Under delay they lose less than Adam does, whose coordinates are not the directions in which a loss is curved.
They take the hidden matrices. Embeddings, the head, norms and biases stay with AdamW, as published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes.config import Training
from recipes.errors import MissingPackage

METHODS = ("muon", "soap")
LONGEST = 4096  # a longer side of a matrix has no basis of its own: SOAP is one-sided there
EVERY = 10  # steps between two refreshes of a basis
REFRESH = 2 + 8 / 3  # operations of one, for each value of a side cubed: the product, and QR by reflections


def embeddings_of(model: nn.Module) -> frozenset[int]:
    """Number the trained parameters, in the layout's order, that are embeddings or the head."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)  # None: of a pipeline stage without the head
    tables += [weight] if weight is not None else []
    found = {id(table) for table in tables}
    trained = [p for p in model.parameters() if p.requires_grad]
    return frozenset(number for number, p in enumerate(trained) if id(p) in found)


def matrix_numbers(shapes: Sequence[Sequence[int]], embeddings: frozenset[int]) -> list[int]:
    """Number the parameters that Muon and SOAP take."""
    return [n for n, shape in enumerate(shapes) if len(shape) == 2 and n not in embeddings]


def state_bytes(optim: str, shapes: Sequence[Sequence[int]], embeddings: frozenset[int]) -> int:
    """Count the bytes of state that `muon` or `soap` holds for parameters of these shapes, float32."""
    matrices = set(matrix_numbers(shapes, embeddings))
    total = 0
    for number, shape in enumerate(shapes):
        sides = sum(2 * side * side for side in shape if side <= LONGEST)  # covariance and basis
        each = {"muon": prod(shape), "soap": 2 * prod(shape) + sides}
        total += each[optim] if number in matrices else 2 * prod(shape)
    return 4 * total


def step_flops(optim: str, shapes: Sequence[Sequence[int]], embeddings: frozenset[int]) -> float:
    """Count the floating-point operations of the matrix products in a step of `muon` or `soap`, averaged over
    steps; 0 of other optimizers. Each peer takes the whole step, however small its share of the samples."""
    if optim not in METHODS:
        return 0.0
    total = 0.0
    for number in matrix_numbers(shapes, embeddings):
        short, long = sorted(shapes[number])
        if optim == "muon":  # torch's five Newton-Schulz steps: X X^T, its square, and their product with X
            total += 5 * (4 * short * short * long + 2 * short**3)
            continue
        for side, other in ((short, long), (long, short)):
            if side <= LONGEST:  # rotated three times, squared once
                total += 8 * side * side * other + REFRESH * side**3 / EVERY
    return total


class MatrixOptimizer(Optimizer):
    """One optimizer for hidden matrices, AdamW for all other parameters.

    Both share this one's groups and state, so that a learning rate is set, and state is saved and restored,
    as with any optimizer.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = iter(self.param_groups)
        for part in self.parts:  # anew: `load_state_dict` replaces both
            part.state = self.state
            part.param_groups = [next(groups) for _group in part.param_groups]
            part.step()


def muon(matrices: list[dict[str, Any]], training: Training) -> Optimizer:
    """Build torch's Muon, with the rate scaled to AdamW's root mean square (Liu et al., 2025), so that one
    learning rate serves both. Raises MissingPackage where torch is older than 2.9."""
    kind = getattr(torch.optim, "Muon", None)
    if kind is None:
        raise MissingPackage(
            f"training.optim `muon` needs torch 2.9 or newer, here is {torch.__version__}",
            "torch",
            hints=("or training.optim=adamw_torch_fused",),
        )
    made: Optimizer = kind(
        matrices, lr=training.learning_rate, momentum=training.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return made


class Soap(Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., 2024, algorithm 3).

        L <- beta2 L + (1 - beta2) G G^T,  R likewise        covariances of rows and columns
        G' = Q_L^T G Q_R                                     the gradient in their eigenvectors
        m <- beta1 m + (1 - beta1) G                         in the weight's own coordinates
        v <- beta2 v + (1 - beta2) G'^2                      in the eigenbasis
        W <- W - rate Q_L (Q_L^T m Q_R / (sqrt(v) + eps)) Q_R^T
        Q_L <- QR(L Q_L), Q_R likewise, every `EVERY` steps; the first are the first gradient's eigenvectors

    A side longer than `LONGEST` has no basis.
    """

    def __init__(self, groups: list[dict[str, Any]], training: Training) -> None:
        betas = training.adam_beta1, training.adam_beta2
        rest = {"eps": training.adam_epsilon, "weight_decay": 0.0}
        super().__init__(groups, {"lr": training.learning_rate, "betas": betas, **rest})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self._begin(weight.grad, self.state[weight])
                    continue
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * self._direction(weight.grad, self.state[weight], group))

    def _begin(self, grad: Tensor, state: dict[str, Any]) -> None:
        """Take the first gradient's eigenvectors. There is no step with it: in its own eigenbasis it is
        diagonal, and all that would be divided elsewhere is rounding."""
        state |= {"step": 0, "exp_avg": torch.zeros_like(grad), "exp_avg_sq": torch.zeros_like(grad)}
        for side, square in squares(grad):
            state[f"{side}.covariance"] = square
            state[f"{side}.basis"] = torch.linalg.eigh(square)[1].flip(-1)

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """Return the step (m, n) for a rate of 1."""
        state["step"] += 1
        beta1, beta2 = group["betas"]
        left, right = state.get("left.basis"), state.get("right.basis")
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].lerp_(rotated(grad, left, right).square(), 1 - beta2)
        mean = rotated(state["exp_avg"], left, right) / (1 - beta1 ** state["step"])
        spread = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        for side, square in squares(grad):
            covariance = state[f"{side}.covariance"].lerp_(square, 1 - beta2)
            if state["step"] % EVERY == 0:  # a step of orthogonal iteration
                state[f"{side}.basis"] = torch.linalg.qr(covariance @ state[f"{side}.basis"])[0]
        return rotated(mean / spread, left, right, back=True)


def squares(grad: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield G G^T (m, m) and G^T G (n, n), of the sides that have a basis."""
    for side, matrix in (("left", grad), ("right", grad.T)):
        if len(matrix) <= LONGEST:
            yield side, matrix @ matrix.T


def rotated(x: Tensor, left: Tensor | None, right: Tensor | None, back: bool = False) -> Tensor:
    """Compute Q_L^T x Q_R, (m, n), or with `back` Q_L x Q_R^T; None: that side has no basis."""
    if left is not None:
        x = (left if back else left.T) @ x
    if right is not None:
        x = x @ (right.T if back else right)
    return x
