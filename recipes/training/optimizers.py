"""The local optimizer and the learning-rate schedule, by their transformers names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from recipes.config import Training
from recipes.errors import MissingPackage

from .matrix_optimizers import METHODS, MatrixOptimizer, Soap, matrix_numbers, muon, state_bytes

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


def set_learning_rate(
    optimizer: Optimizer, rate: float, beta1: float | None = None, longer: float = 1.0
) -> None:
    """Set the learning rate of all groups; and beta1, where there is one.

    Args:
        longer: factor on each step, as if the root of the second moment were so many times smaller: epsilon
            stays what it is beside that, and weight decay what it is beside `rate`.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * longer
        for name, scale in (("eps", longer), ("weight_decay", 1 / longer)):
            if isinstance(given := group.setdefault(f"given_{name}", group.get(name)), float):
                group[name] = given * scale
        if beta1 is not None and "betas" in group:
            group["betas"] = (beta1, *group["betas"][1:])
