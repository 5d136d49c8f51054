"""The local optimizer and the learning-rate schedule, by their transformers names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import get_scheduler

from recipes.schema import Training


def build_optimizer(model: nn.Module, training: Training) -> Optimizer:
    """The optimizer over the trainable parameters; weight decay on matrices only, as transformers has it.

    The parameters must already be views of the flat vector: `step()` then changes that vector in place.
    """
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]  # biases and norms
    groups = [
        {"params": decayed, "weight_decay": training.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optim == "sgd":
        return torch.optim.SGD(groups, lr=training.learning_rate)
    return torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=training.optim == "adamw_torch_fused",
    )


def learning_rate(training: Training, steps: int) -> Callable[[int], float]:
    """step -> learning rate of a run of `steps` steps. A function of the step alone: a peer may join at any.

    Past the end it stays at the last step's: that is the rate of work which a lost peer left behind.
    """
    schedule = get_scheduler(
        training.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate),  # it wants one; it is never stepped
        num_warmup_steps=training.warmup(steps),
        num_training_steps=max(steps, 1),
        scheduler_specific_kwargs=dict(training.lr_scheduler_kwargs),
    )
    factors: Callable[[int], float] = schedule.lr_lambdas[0]
    return lambda step: training.learning_rate * factors(min(step, steps - 1))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
