"""The trainer whose gradients come from a user's own loop.

The product's loop (`recipes.training.finetune`) runs in a thread of its own, the user's where the user has
it. They take turns, and only exchanges go on beside the user's:

    finetune                                    the user's loop
    opens a round, starts its exchange
    backward: hands over the turn    ------>    forward and backward, at x_i
    steps the optimizer, joins       <------    swarm.step(loss, samples)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cocktail_cli.errors import Failure
from recipes.config import Recipe
from recipes.data import Sample
from recipes.objectives import Measured
from recipes.training import FlatParameters, Interrupted, ModelExtension, SingleDeviceTrainer, clip

T = TypeVar("T")
POLL = 0.2  # seconds between two looks at whether the other thread is there
NO_GRADIENT = "no parameter has a gradient: no loss.backward() came before this step"

Evaluate = Callable[[nn.Module], float]  # mean loss of a model on a user's held-out data


@dataclass(frozen=True)
class Gradient:
    """A gradient of the user's, in `.grad` of the parameters."""

    loss: float
    samples: int
    norm: float  # before clipping


class Turns:
    """Hands the turn to and fro between the user's thread and the one of `finetune`."""

    def __init__(self) -> None:
        self.leaving = threading.Event()  # this peer is to leave
        self.patience = inf  # seconds for the user's loop to call `step`
        self.stalled = ""  # why this peer left, where the user's loop stood still
        self.samples = 0  # that the run would like the next gradient to be of
        self._to_user: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: go on
        self._to_loop: SimpleQueue[object] = SimpleQueue()
        self._theirs = False  # it is the user's turn
        self.ended = threading.Event()  # finetune does not hand over the turn any more

    # ---- the user's thread ---------------------------------------------------------------------------------

    def give(self, what: Gradient) -> None:
        self._theirs = False
        self._to_loop.put(what)

    def wait(self) -> bool:
        """Wait for the turn, and call meanwhile what the other thread asks; False: there is none any more."""
        while True:
            try:
                call = self._to_user.get(timeout=POLL)
            except Empty:
                if self.ended.is_set():
                    return False
                continue
            if call is None:
                self._theirs = True
                return True
            try:
                self._to_loop.put(call())
            except BaseException:
                self.leaving.set()
                raise

    # ---- the thread of finetune ----------------------------------------------------------------------------

    def gradient(self, samples: int) -> Gradient:
        """Hand the turn over, unless an earlier session has, until there is a gradient. Raises
        Interrupted."""
        self.samples = samples
        while not self._to_loop.empty():  # of a session that is over
            self._to_loop.get()
        if not self._theirs and self._to_user.empty():
            self._to_user.put(None)
        found = self._answer(self.patience)
        assert isinstance(found, Gradient)
        return found

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the user's thread. Raises Interrupted."""
        self._to_user.put(function)
        found: T = self._answer(inf)  # type: ignore[assignment]
        return found

    def _answer(self, patience: float) -> object:
        end = time.monotonic() + patience
        while True:
            try:
                return self._to_loop.get(timeout=POLL)
            except Empty:
                if self.leaving.is_set():
                    raise Interrupted("asked to leave") from None
                if time.monotonic() > end:
                    self.stalled = f"its loop had not called swarm.step for {patience:.0f} s"
                    self.leaving.set()


def own_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return each parameter's gradient, dense; zeros where it has none, a copy where it shares memory, as one
    that was set by hand may."""
    gradients, seen = list[Tensor](), set[int]()
    for parameter in parameters:
        given = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
        parameter.grad = given.clone() if 0 in given.stride() or given.data_ptr() in seen else given
        seen.add(given.data_ptr())
        gradients.append(parameter.grad)
    return gradients


class LoopTrainer:
    """A `recipes.training.Trainer` of a user's model and optimizer. The recipe's rate is that of the first
    group of parameters; others keep their ratio to it.

    Args:
        evaluate: measures a model on the user's held-out data; None: it has none.
    """

    extensions: Sequence[ModelExtension] = ()
    at_once = in_memory = 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        turns: Turns,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.inner = SingleDeviceTrainer(model, recipe, optimizer=optimizer)
        assert isinstance(self.inner.flat, FlatParameters), "a run of own loops has float32 masters"
        self.flat, self.turns, self.measure, self.training = self.inner.flat, turns, evaluate, recipe.training
        self.layout, self.kind, self.sizes = self.inner.layout, self.inner.kind, self.inner.sizes
        self.gradient: Gradient | None = None  # of this step
        self.evaluating = False
        self._noted: list[tuple[int, int]] = []
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        groups = optimizer.param_groups
        first = groups[0]["lr"] or 1.0
        self._given = [(group["lr"] / first, group.get("betas"), group.get("momentum")) for group in groups]

    # ---- the user's thread ---------------------------------------------------------------------------------

    def collect(self) -> float:
        """Clip all gradients together as the run says, where they are, and return their norm before. A
        parameter without one gets zeros. Raises Failure where none has one, or one is not finite."""
        if self._noted != self._state():
            hints = ("swarm.step alone changes them: one optimizer, no load_state_dict, no .to()",)
            raise Failure("usage", "the parameters were changed between two steps", hints=hints)
        if all(parameter.grad is None for parameter in self._parameters):
            hints = ("loss.backward(), then swarm.step(loss, samples)",)
            raise Failure("usage", NO_GRADIENT, hints=hints)
        norm = clip(own_gradients(self._parameters), self.training.max_grad_norm)
        if not isfinite(norm):
            self.clear()
            hint = "with torch.amp.GradScaler: scaler.unscale_(optimizer), and no swarm.step where it is not"
            raise Failure("usage", "the gradient is not finite, so no step was taken", hints=(hint,))
        return norm

    def note(self) -> None:
        """Note the parameters as the user's turn begins: only `step` is to change them."""
        self._noted = self._state()

    def _state(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self._parameters]

    def release(self) -> None:
        """Free the gradient's vector: `backward` makes a gradient for each parameter from now on."""
        self.flat.grad = self.flat.grad.new_empty(0)
        self.clear()

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # ---- the thread of finetune ----------------------------------------------------------------------------

    @property
    def stepped(self) -> bool:
        return self.inner.stepped

    def check(self) -> None:
        """Pass: what is on one device is lost only with this process."""

    def attempt(self, part: Sequence[Sample], aside: float) -> float:
        return 0.0

    def zero(self, share: float = 1.0) -> None:
        self.gradient = None
        self.clear()

    def backward(self, parts: Sequence[Sequence[Sample]], terms: int, lease: int | None = None) -> Measured:
        """Wait for the user's gradient, once a step, and count it for these leased samples."""
        if self.gradient is None:
            self.gradient = self.turns.gradient(terms)
        found, leased = self.gradient, sum(map(len, parts))
        return Measured(found.loss * leased, leased, (found.samples * leased / max(terms, 1),))

    def partly(self, done: float) -> None:
        """Pass: a user's gradient comes whole, and its noise is not measured."""

    def clip(self, limit: float) -> float | None:
        return self.gradient.norm if self.gradient is not None else None

    def step(self, rate: float, beta1: float | None = None) -> None:
        """Step the user's optimizer, with its first moment's decay as much shorter as the swarm wants."""
        usual = self.training.adam_beta1
        share = beta1 / usual if beta1 is not None and usual else 1.0
        for group, (ratio, betas, momentum) in zip(
            self.inner.optimizer.param_groups, self._given, strict=True
        ):
            group["lr"] = rate * ratio
            if betas is not None:
                group["betas"] = (share * betas[0], *betas[1:])
            if momentum is not None:
                group["momentum"] = share * momentum
        self.flat.step(self.inner.optimizer)

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> Measured:
        mean = self.turns.call(lambda: self._evaluated(vector))
        return Measured(mean * len(samples), len(samples), (float(len(samples)),))

    def _evaluated(self, vector: Tensor) -> float:
        assert self.measure is not None, "a run that evaluates refuses peers that cannot"
        with self.at(vector) as model, torch.no_grad():
            training = model.training
            model.eval()
            try:
                return float(self.measure(model))
            finally:
                model.train(training)

    @contextmanager
    def at(self, vector: Tensor) -> Iterator[nn.Module]:
        """Let the model compute with `vector` meanwhile."""
        before, self.evaluating = self.evaluating, True
        try:
            with self.flat.use(vector) as model:
                yield model
        finally:
            self.evaluating = before
            self.note()

    def tensors(self) -> Mapping[str, Tensor]:
        return self.inner.tensors()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.inner.shapes()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load(tensors)
