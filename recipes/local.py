"""This peer's model in training: x_i, its gradient and its optimizer.

The loop (finetune.py) asks for nothing else, so it does not know whether they lie on one device (`Alone`) or
are spread over several (spread.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recipes.data import Sample, collate
from recipes.flat import Flat, Layout
from recipes.model import evaluate, loss_sum
from recipes.optim import build_optimizer, set_learning_rate
from recipes.schema import Training

LOCAL, OPTIMIZER = "x", "optimizer"  # names of what is kept: x, and optimizer.<parameter's number>.<what>


class Local(Protocol):
    """What the loop asks for."""

    at_once: int  # micro-batches that are computed at the same time

    @property
    def layout(self) -> Layout: ...
    @property
    def stepped(self) -> bool:
        """Has the optimizer a state?"""

    def zero(self) -> None:
        """g_i <- 0."""

    def backward(self, parts: Sequence[Sequence[Sample]], tokens: int) -> float:
        """g_i += the gradient of the summed losses of up to `at_once` micro-batches by `tokens`; that sum."""

    def clip(self, limit: float) -> float:
        """The norm of g_i, which is `limit` at most afterwards; 0: no limit."""

    def step(self, rate: float) -> None:
        """x_i <- x_i - optimizer(g_i)."""

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> tuple[float, int]:
        """Sum and number of token losses at `vector` (P,), in micro-batches of `size`; x_i stays."""

    def tensors(self) -> Mapping[str, Tensor]:
        """What a peer keeps for its return, by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of x, and of each parameter by `optimizer.<number>`: what `load` takes."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `tensors` gave, one after the other."""


class Lazy(Mapping[str, Tensor]):
    """Tensors that are made or read when they are asked for: memory may not hold them all."""

    def __init__(self, made: Mapping[str, Callable[[], Tensor]]) -> None:
        self.made = made

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


class Alone:
    """All of it on the device of the model."""

    at_once = 1

    def __init__(self, model: nn.Module, training: Training) -> None:
        self.model = model
        self.flat = Flat(model)  # the model's parameters as one vector x_i
        self.optimizer = build_optimizer(model, training)

    @property
    def layout(self) -> Layout:
        return self.flat.layout

    @property
    def stepped(self) -> bool:
        return bool(self.optimizer.state)

    def zero(self) -> None:
        self.model.train()
        self.flat.grad.zero_()

    def backward(self, parts: Sequence[Sequence[Sample]], tokens: int) -> float:
        return sum(backward(self.model, part, tokens, self.flat.vector.device) for part in parts)

    def clip(self, limit: float) -> float:
        whole = limit if limit > 0 else float("inf")
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), whole))

    def step(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> tuple[float, int]:
        with self.flat.use(vector):
            return evaluate(self.model, samples, size)

    def tensors(self) -> Mapping[str, Tensor]:
        state = named(self.optimizer.state_dict()["state"])
        whole = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in state.items()}
        return {LOCAL: self.flat.vector, **whole}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        parameters = enumerate(parameters_of(self.optimizer))
        return {LOCAL: (self.layout.size,)} | {f"{OPTIMIZER}.{n}": tuple(p.shape) for n, p in parameters}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.flat.vector.copy_(tensors[LOCAL])
        state: dict[int, dict[str, Tensor]] = {}
        for name in tensors:
            if name != LOCAL:
                number, what = parsed(name)
                state.setdefault(number, {})[what] = tensors[name]
        load_state(self.optimizer, state)


def backward(model: nn.Module, part: Sequence[Sample], tokens: int, device: torch.device) -> float:
    """One micro-batch: its losses by `tokens`, into the gradients; the sum of its losses."""
    loss, _ = loss_sum(model, batch_of(part, device))
    (loss / max(tokens, 1)).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def batch_of(part: Sequence[Sample], device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in collate(part).items()}


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """By the numbers that its state has them under."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named(state: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """An optimizer's state, as it is kept."""
    return {f"{OPTIMIZER}.{n}.{what}": value for n, of in state.items() for what, value in of.items()}


def parsed(name: str) -> tuple[int, str]:
    """The number of the parameter, and what is kept of it."""
    _, number, what = name.split(".", 2)
    return int(number), what


def load_state(optimizer: Optimizer, state: Mapping[int, Mapping[str, Tensor]]) -> None:
    """The state alone: groups and rates are the recipe's and the schedule's."""
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
