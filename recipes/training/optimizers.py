"""The local optimizer and the learning-rate schedule, by their transformers names.

Two take a weight as the matrix it is: Muon, and Adam in Shampoo's eigenbasis (SOAP). Under delay they lose
less than Adam does, whose coordinates are not the directions in which a loss is curved. They take the hidden
matrices. Embeddings, the head, norms and biases stay with AdamW, as published.

Momentum masking is that of Deep Gradient Compression (Lin et al., ICLR 2018, section 3.2). A coordinate that
was sent has left the residual. Its momentum is made of gradients that the swarm has by then, and would push
x_i the same way once more, so it starts again from zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compress import Update
from recipes.algorithm import ShardUpdate, each_window
from recipes.config import Training
from recipes.errors import MissingPackage

# ---- optimizers of matrices --------------------------------------------------------------------------------

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


# ---- all optimizers, and the schedule ----------------------------------------------------------------------

# bytes of state for each parameter; of 8 bits with a scale for each 256
STATE = {
    "adamw_torch_fused": 8.0,
    "adamw_torch": 8.0,
    "adamw_8bit": 2.04,
    "paged_adamw_8bit": 0.0,  # in the host's memory, when there is no room
    "adamw_torch_8bit": 2.04,
    "adafactor": 0.01,  # a row and a column of each matrix
    "sgd": 0.0,
    "muon": 8.0,  # at most: 4 on the matrices that it takes
    "soap": 24.0,  # at most, of square matrices
}
# bytes of temporaries for each value of the largest parameter, while it is stepped; none: a fused kernel
SCRATCH = {"adamw_torch": 8.0, "adafactor": 8.0, "sgd": 4.0, "muon": 12.0, "soap": 12.0}
LINEAR = ("sgd",)  # whose mean of steps is the step of the mean: nothing divides by a gradient's noise
EIGHT_BIT = {  # name -> (module, class)
    "adamw_8bit": ("bitsandbytes.optim", "AdamW8bit"),
    "paged_adamw_8bit": ("bitsandbytes.optim", "PagedAdamW8bit"),
    "adamw_torch_8bit": ("torchao.optim", "AdamW8bit"),
}


def optimizer_bytes(optim: str, shapes: Sequence[Sequence[int]], embeddings: frozenset[int]) -> int:
    """Count the bytes of an optimizer's state for parameters of these shapes."""
    if optim in METHODS:
        return state_bytes(optim, shapes, embeddings)
    return round(STATE[optim] * sum(map(prod, shapes)))


def build_optimizer(
    trained: Sequence[Tensor], training: Training, embeddings: frozenset[int] = frozenset()
) -> Optimizer:
    """Build the optimizer over what is trained; weight decay on matrices only, as transformers has it.

    Args:
        trained: views of the flat vector: `step()` then changes that vector in place.
        embeddings: numbers of those that are embeddings or the head, which `muon` and `soap` leave to AdamW.

    Raises:
        MissingPackage: a library that it needs is not installed.
    """
    if training.optim in METHODS:
        numbers = set(matrix_numbers([p.shape for p in trained], embeddings))
        matrices = decayed([p for n, p in enumerate(trained) if n in numbers], training)
        rest = [p for n, p in enumerate(trained) if n not in numbers]
        parts: list[Optimizer] = []
        if matrices:
            parts.append(muon(matrices, training) if training.optim == "muon" else Soap(matrices, training))
        if rest:
            parts.append(build_optimizer(rest, training.model_copy(update={"optim": "adamw_torch"})))
        return MatrixOptimizer(parts)
    groups = decayed(trained, training)
    rate, betas = training.learning_rate, (training.adam_beta1, training.adam_beta2)
    if training.optim == "sgd":
        return torch.optim.SGD(groups, lr=rate, foreach=False)  # one parameter's temporaries at a time
    if training.optim == "adafactor":
        from transformers import Adafactor

        fixed = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
        adafactor: Optimizer = Adafactor(groups, lr=rate, **fixed)  # type: ignore[no-untyped-call]
        return adafactor
    if training.optim in EIGHT_BIT:
        return eight_bit(training.optim)(groups, lr=rate, betas=betas, eps=training.adam_epsilon)
    fused = training.optim == "adamw_torch_fused"
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=training.adam_epsilon, fused=fused)


def decayed(trained: Sequence[Tensor], training: Training) -> list[dict[str, Any]]:
    """Group the parameters by weight decay: biases and norms have none."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def eight_bit(name: str) -> Callable[..., Optimizer]:
    """Import an 8-bit optimizer. Raises MissingPackage."""
    module, kind = EIGHT_BIT[name]
    try:
        found: Any = getattr(import_module(module), kind)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # a library built for another torch
        package = module.partition(".")[0]
        raise MissingPackage(
            f"training.optim `{name}` needs {package}, which is not here: {error}",
            package,
            hints=("or training.optim=adamw_torch_fused",),
        ) from error
    optimizer: Callable[..., Optimizer] = found
    return optimizer


def learning_rate(training: Training, steps: int) -> Callable[[int], float]:
    """Build the schedule, step -> learning rate, of a run of `steps` steps. It depends on the step alone: a
    peer may join at any.

    Past the end it stays at the last step's: that is the rate of work which a lost peer left behind.
    """
    from transformers import get_scheduler  # brings peft and more: ranks have no use for it

    schedule = get_scheduler(
        training.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate),  # it wants one; it is never stepped
        num_warmup_steps=training.warmup(steps),
        num_training_steps=max(steps, 1),
        scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
    )
    factors: Callable[[int], float] = schedule.lr_lambdas[0]
    return lambda step: training.learning_rate * factors(min(step, steps - 1))


# ---- momentum masking --------------------------------------------------------------------------------------


def mask_momentum(
    optimizer: Optimizer, parameters: Sequence[Tensor], offsets: Sequence[int], taken: ShardUpdate
) -> None:
    """Set AdamW's first moment to zero at the coordinates of an update that the aggregator has taken. One of
    a whole shard, as in uncompressed steps, leaves it: nothing there was late.

    Args:
        parameters: those of all of x_i, in the vector's order.
        offsets: start of each parameter in the vector, and P at the end (`Layout.offsets`).
    """
    if taken.update.count == taken.shard.size:
        return
    device = parameters[0].device
    starts = torch.tensor(offsets, device=device)

    def clear(window: Update) -> None:
        at = taken.sample.coordinates(window.positions) + taken.shard.start  # (k,) ascending
        cuts = torch.searchsorted(at, starts).tolist()
        for n, parameter in enumerate(parameters):
            if state := optimizer.state.get(parameter):  # empty before its first step
                state["exp_avg"].view(-1)[at[cuts[n] : cuts[n + 1]] - starts[n]] = 0

    each_window(taken.update, device, clear)
