"""The trainer of a peer on one device: x_i, its gradient and its optimizer, and the optimizer's state by
name.

What the loop asks for is `types.Trainer`, which may be spread over several devices too.

x_i is one vector, of which the model's parameters are views (`FlatParameters`).

Without float32 master weights x_i = x' + d_i, of which d_i alone is stored, in bfloat16, rounded at random
(`RoundedLocalModel`). Were x_i itself in bfloat16, its rounding, up to 2^-9 |x_i|, would be larger than most
steps; it would stand in d_i = x_i - x', and peers would send it to each other for ever. d_i is small, and so
is what rounding does to it. Rounded at random, with the right mean, small steps are not lost but rare.

    refresh    the model's copy <- x' + d_i
    step       x_i <- x' + d_i in float32, for some parameters at a time; the optimizer; d_i <- x_i - x'
    C[D]       moves x' and x_i alike: d_i stays                      C[d_i]    d_i <- d_i - C[d_i]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite, prod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compress import Sample as Coordinates
from compress import Shard, Update, brought
from recipes.algorithm import ShardUpdate, each_window
from recipes.config import Recipe
from recipes.data import Sample
from recipes.errors import ModelError
from recipes.hardware import half_precision
from recipes.models import autocast_dtype, trained_dtype
from recipes.objectives import BatchLoss, Measured, evaluate, measured, objective_of
from recipes.weight_files import layout_of

from .gradient_noise import NOISE_VALUES, GradientNoise, positions_of
from .micro_batch import share_taken, sizes_of
from .optimizers import LINEAR, build_optimizer, embeddings_of
from .types import ModelExtension

# ---- x_i ---------------------------------------------------------------------------------------------------

GRADIENT_CHUNK = 1 << 26  # gradient elements converted to FP32 at a time: 256 MiB


class FlatParameters:
    """The trained parameters of `model` as one vector in FP32, and their gradients as another.

    In FP32 the model's parameters are views of the vector itself. With a half-precision `dtype` they are
    views of a copy, which `refresh` updates; the vector has the master weights, and gradients are of that
    dtype too.

    The vector is filled parameter by parameter, and each parameter's former memory is freed: a device is
    never given more of a model in the host's memory than what stays there.

    Args:
        device: of model, copy and gradients; None: the model's own. A frozen part moves there as well.
        vector_on: device of the vector, if another.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        vector_on: torch.device | None = None,
    ) -> None:
        self.model = model
        self.layout = layout_of(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]  # tied weights once
        dtypes = {p.dtype for p in self._parameters}
        devices = {p.device for p in self._parameters}
        if dtypes != {torch.float32} or len(devices) != 1:
            raise ModelError(f"parameters of {dtypes} on {devices}, expected float32 on one device")
        size, own = self.layout.size, devices.pop()
        there = device or own
        self.vector = torch.empty(size, device=vector_on or there)  # (P,) float32
        self.copy = None if dtype == torch.float32 else torch.empty(size, dtype=dtype, device=there)  # (P,)
        with torch.no_grad():
            for p, start, stop in zip(
                self._parameters, self.layout.offsets, self.layout.offsets[1:], strict=False
            ):
                self.vector[start:stop] = p.reshape(-1)
                if self.copy is not None:
                    self.copy[start:stop] = p.reshape(-1).to(dtype)
                p.data = (self.vector if self.copy is None else self.copy)[start:stop].view(p.shape)
        if there != own:
            model.to(there)  # buffers; the parameters are there
        self.grad = torch.zeros(size, dtype=dtype, device=there)  # (P,)
        self.grads = self.layout.views(self.grad)
        for p, g in zip(self._parameters, self.grads, strict=True):
            p.grad = g  # autograd adds to an existing gradient, so backward() fills the vector

    @cached_property
    def masters(self) -> list[Tensor]:
        """Parameters for the optimizer: views of the vector."""
        if self.copy is None:
            return [*self._parameters]
        return [view.detach().requires_grad_() for view in self.layout.views(self.vector)]

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer: x_i <- x_i - optimizer(g_i). Half-precision gradients become FP32 in chunks."""
        if self.copy is None:
            optimizer.step()
            return
        for part in self._parts:
            for master, grad in part:
                master.grad = grad.float()
            optimizer.step()  # skips parameters without a gradient
            for master, _ in part:
                master.grad = None

    @cached_property
    def _parts(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Masters with their gradients, in parts of about GRADIENT_CHUNK elements."""
        parts: list[list[tuple[Tensor, Tensor]]] = []
        room = 0
        for pair in zip(self.masters, self.grads, strict=True):
            if room <= 0:
                parts.append([])
                room = GRADIENT_CHUNK
            parts[-1].append(pair)
            room -= pair[0].numel()
        return parts

    def take(self, x: Tensor) -> None:
        """Copy x into the vector."""
        self.vector.copy_(x)

    def refresh(self) -> None:
        """Update the half-precision copy from the vector."""
        if self.copy is not None:
            self.copy.copy_(self.vector)

    @contextmanager
    def use(self, vector: Tensor) -> Iterator[nn.Module]:
        """Let the model compute with `vector` (P,) meanwhile; a half-precision copy needs `refresh` after.

        Where `vector` is in the host's memory, that of this model waits there as well: a device has no room
        for both. Nobody may read or move it meanwhile.
        """
        self.layout.check(vector)
        if self.copy is not None:
            fill(self.copy, vector)
            yield self.model
            return
        if vector.device == self.vector.device:
            self._point_at(vector)
            try:
                yield self.model
            finally:
                self._point_at(self.vector)
            return
        aside = self.vector.cpu()
        try:
            fill(self.vector, vector)
            yield self.model
        finally:
            fill(self.vector, aside)

    def _point_at(self, vector: Tensor) -> None:
        for p, view in zip(self._parameters, self.layout.views(vector), strict=True):
            p.data = view


def fill(to: Tensor, vector: Tensor) -> None:
    """Copy a vector to another of any device and dtype, window by window."""
    for start in range(0, len(vector), GRADIENT_CHUNK):
        window = vector[start : start + GRADIENT_CHUNK]
        to[start : start + len(window)] = brought(window, to.device)


def clip(gradients: list[Tensor], limit: float) -> float:
    """Clip the gradient that all of these are to the norm `limit` (0: no clipping); returns its norm before.
    One that is short enough is only read."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if limit > 0 and not (factor := limit / (norm + 1e-6)) >= 1:  # it may be NaN
        torch._foreach_mul_(gradients, factor)
    return float(norm)


# ---- x_i without master weights ----------------------------------------------------------------------------

LOW = 0xFFFF  # the bits of a float32 that bfloat16 has not


def rounded(x: Tensor, noise: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, to one of the two neighbours at random, so that the mean is x."""
    bits = x.contiguous().view(torch.int32)
    drawn = torch.randint(0, LOW + 1, bits.shape, dtype=torch.int32, device=x.device, generator=noise)
    return drawn.add_(bits).bitwise_and_(~LOW).view(torch.float32).to(torch.bfloat16)


class RoundedLocalModel:
    """Stands in for FlatParameters, and is x_i for a Worker (`recipes.algorithm.LocalModel`).

    Args:
        seed: of the noise, this peer's own.
        device: of d_i and the model; None: the model's own.
        global_model_on: device of x'; None: the same.
    """

    from_global_model = True

    def __init__(
        self,
        model: nn.Module,
        seed: int,
        device: torch.device | None = None,
        global_model_on: torch.device | None = None,
    ) -> None:
        self._flat = FlatParameters(model, torch.bfloat16, device, global_model_on)
        assert self._flat.copy is not None
        self.model, self.layout = model, self._flat.layout
        self.grad, self.grads, self.copy = self._flat.grad, self._flat.grads, self._flat.copy
        self.global_model = self._flat.vector  # x', (P,) float32
        self.residual = torch.zeros_like(self.copy)  # d_i   (P,) bfloat16
        self.noise = torch.Generator(self.copy.device).manual_seed(seed)
        empty = torch.zeros((), device=self.copy.device)
        # of a shape, and without memory
        self._nothing = [empty.expand(shape) for shape in self.layout.shapes]
        self.masters: list[Tensor] = [nn.Parameter(nothing) for nothing in self._nothing]

    def bring_global_model(self) -> None:
        """Bring x' from the host's memory beside d_i."""
        self.global_model = self._flat.vector = self.global_model.to(self.residual.device)

    @property
    def vector(self) -> Tensor:
        """x_i (P,), computed anew in the host's memory: a device has no room for it."""
        x = torch.empty(self.layout.size)
        for start, stop in self._windows():
            x[start:stop] = self._x(start, stop)
        return x

    def take(self, x: Tensor) -> None:
        """x_i <- x."""
        for start, stop in self._windows():
            there = brought(x[start:stop], self.residual.device)
            self.residual[start:stop] = there - self._global_model(start, stop)

    def step(self, optimizer: Optimizer) -> None:
        for part in self._parts():
            for i in part:
                self.masters[i].data = self._x(*self._place(i)).view(self.layout.shapes[i])
                self.masters[i].grad = self.grads[i].float()
            optimizer.step()  # passes over the parameters without a gradient
            for i in part:
                start, stop = self._place(i)
                d = self.masters[i].data.view(-1).sub_(self._global_model(start, stop))
                self.residual[start:stop] = rounded(d, self.noise)
                self.masters[i].data, self.masters[i].grad = self._nothing[i], None

    def refresh(self) -> None:
        for start, stop in self._windows():
            self.copy[start:stop] = self._x(start, stop)

    @contextmanager
    def use(self, vector: Tensor) -> Iterator[nn.Module]:
        """Compute with `vector` like FlatParameters; the model's copy waits for its `refresh` afterwards."""
        with self._flat.use(vector) as model:
            yield model

    # ---- x_i for a Worker ----------------------------------------------------------------------------------

    def difference(self, shard: Shard, sample: Coordinates, other: Tensor) -> Tensor:
        assert other is self.global_model
        return sample.take(shard.of(self.residual)).float()

    def bring(self, piece: ShardUpdate) -> None:
        """Pass, like `LocalVector`."""

    def add_(self, piece: ShardUpdate, alpha: int = 1) -> None:
        """Leave d_i at + C[D], since x' has moved as far; shrink it at - C[d_i]."""
        if alpha == 1:
            return
        here = piece.shard.of(self.residual)

        def shrink(window: Update) -> None:
            where = piece.sample.coordinates(window.positions)
            here[where] = rounded(here[where].float() - window.values, self.noise)

        each_window(piece.update, here.device, shrink)

    def distance(self, other: Tensor) -> float:
        assert other is self.global_model
        return float(torch.linalg.vector_norm(self.residual, dtype=torch.float32))

    # ---- small ---------------------------------------------------------------------------------------------

    def _x(self, start: int, stop: int) -> Tensor:
        return self.residual[start:stop].float().add_(self._global_model(start, stop))

    def _global_model(self, start: int, stop: int) -> Tensor:
        """Bring coordinates of x' beside d_i."""
        return brought(self.global_model[start:stop], self.residual.device)

    def _windows(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.layout.size, GRADIENT_CHUNK):
            yield start, min(start + GRADIENT_CHUNK, self.layout.size)

    def _place(self, i: int) -> tuple[int, int]:
        return self.layout.offsets[i], self.layout.offsets[i + 1]

    def _parts(self) -> Iterator[range]:
        """Yield parameters by number, about AT_ONCE elements at a time."""
        first, room = 0, GRADIENT_CHUNK
        for i, (start, stop) in enumerate(pairwise(self.layout.offsets)):
            if room <= 0:
                yield range(first, i)
                first, room = i, GRADIENT_CHUNK
            room -= stop - start
        yield range(first, len(self.layout.names))


# ---- the trainer -------------------------------------------------------------------------------------------

LOCAL, OPTIMIZER = "x", "optimizer"  # names of what is kept: x, and optimizer.<parameter's number>.<what>
NOISE = "noise"  # and what was measured of the gradient's
RANK = "@"  # behind the name of what is kept as one of several ranks has it: its number / how many
GROWS = 2000  # steps after which a larger loss scale is tried, as in torch.amp.GradScaler
PLAIN = (Tensor, nn.Parameter, int, float)  # what of an optimizer's state can be kept


class Lazy(Mapping[str, Tensor]):
    """A mapping of tensors that are made or read when they are asked for: memory may not hold them all."""

    def __init__(self, made: Mapping[str, Callable[[], Tensor]]) -> None:
        self.made = made

    def __getitem__(self, name: str) -> Tensor:
        return self.made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


@dataclass
class LossScale:
    """The factor on a loss that makes small gradients numbers in float16 too. 1: none."""

    value: float = 1.0
    steps: int = 0  # since it last changed

    def held(self, norm: float) -> bool:
        """Can a gradient of this norm be used? Where it cannot, half the scale is tried."""
        if self.value > 1 and not isfinite(norm):
            self.value, self.steps = self.value / 2, 0
            return False
        self.steps += 1
        if self.value > 1 and self.steps == GROWS:
            self.value, self.steps = 2 * self.value, 0
        return True


class SingleDeviceTrainer:
    """A trainer whose state is all on one device: `device`, or that of the model. `optimizer`: of all trained
    parameters; None: the recipe's."""

    at_once = in_memory = 1
    extensions: Sequence[ModelExtension] = ()

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        seed: int = 0,
        device: torch.device | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.model, self.objective = model, objective_of(recipe)
        self.flat: FlatParameters | RoundedLocalModel  # the vector x_i
        if recipe.training.fp32_master_weights:
            self.flat = FlatParameters(model, trained_dtype(recipe), device)
        else:
            apart = None if recipe.compression.state_device == "accelerator" else torch.device("cpu")
            self.flat = RoundedLocalModel(model, seed, device, apart)
        self.layout, self.device = self.flat.layout, self.flat.grad.device
        self.kind, self.sizes = self.device.type, sizes_of(getattr(model, "config", None))
        masters, training = self.flat.masters, recipe.training
        self.optimizer = optimizer or build_optimizer(masters, training, embeddings_of(model))
        # None: as the weights are
        self.half = autocast_dtype(recipe.training, model, half_precision(self.device))
        self.scale = LossScale(2.0**16) if self.half == torch.float16 else LossScale()
        self.noise = GradientNoise(positions_of(self.layout), recipe.training.adam_beta2, self.device)
        self.linear = recipe.training.optim in LINEAR
        if recipe.training.torch_compile:
            model.compile()

    def precision(self) -> AbstractContextManager[object]:
        """Enter the precision of forward passes."""
        return torch.autocast(self.device.type, self.half, enabled=self.half is not None)

    @property
    def stepped(self) -> bool:
        return bool(self.optimizer.state)

    def attempt(self, part: Sequence[Sample], aside: float) -> float:
        self.zero()
        terms = self.objective.terms(part)
        try:
            return share_taken(self.device, aside * self.layout.size, lambda: self.backward([part], terms))
        finally:
            self.zero()

    def check(self) -> None:
        """Pass: what is on one device is lost only with this process."""

    def zero(self, share: float = 1.0) -> None:
        self.model.train()
        self.flat.refresh()
        self.flat.grad.zero_()
        self.noise.begin(share)

    def sampled(self) -> Tensor:
        """Take the sample of g_i that its noise is measured on."""
        return self.flat.grad[self.noise.positions].float()

    def backward(self, parts: Sequence[Sequence[Sample]], terms: int, lease: int | None = None) -> Measured:
        found = Measured()
        for part in parts:
            with observed(self.extensions, self.model, part, lease) as notes:
                with self.precision():
                    loss = self.objective.loss(self.model, part, self.device)
                one = backward(loss, terms, self.scale.value)
            found += replace(one, notes=notes)
        return found

    def partly(self, done: float) -> None:
        self.noise.partly(done, self.sampled())

    def clip(self, limit: float) -> float | None:
        if self.scale.value != 1:
            self.flat.grad.div_(self.scale.value)
        limit *= self.noise.sums.norms(self.noise.share)
        norm = clip(self.flat.grads, limit)
        self.noise.scaled((min(1.0, limit / (norm + 1e-6)) if limit else 1.0) / self.scale.value)
        if self.noise.wanted:
            self.noise.take(self.sampled())
        return norm if self.scale.held(norm) else None

    def step(self, rate: float, beta1: float | None = None) -> None:
        self.lengthened_step(rate, beta1, 1.0 if self.linear else self.noise.sums.factor)

    def lengthened_step(self, rate: float, beta1: float | None, longer: float) -> None:
        """Step so many times as far as the optimizer would, and measure the noise of g_i."""
        self.noise.observe()
        set_learning_rate(self.optimizer, rate, beta1, longer)
        self.flat.step(self.optimizer)

    def evaluate(self, vector: Tensor, samples: Sequence[Sample], size: int) -> Measured:
        with self.flat.use(vector), self.precision():
            return evaluate(self.objective, self.model, samples, size)

    def tensors(self) -> Mapping[str, Tensor]:
        return {LOCAL: self.flat.vector, NOISE: self.noise.state(), **states_of(self.optimizer)}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        parameters = enumerate(parameters_of(self.optimizer))
        own = {LOCAL: (self.layout.size,), NOISE: (NOISE_VALUES,)}
        return own | {f"{OPTIMIZER}.{n}": tuple(p.shape) for n, p in parameters}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.flat.take(tensors[LOCAL])
        load_states(self.optimizer, tensors)
        if NOISE in tensors:
            self.noise.load(tensors[NOISE])


@contextmanager
def observed(
    extensions: Sequence[ModelExtension], model: nn.Module, part: Sequence[Sample], lease: int | None
) -> Iterator[dict[str, str]]:
    """Let extensions observe a micro-batch of the lease of a round; None: none of them does. Yields a mapping
    that has their notes afterwards."""
    notes: dict[str, str] = {}
    with ExitStack() as stack:
        watching = [] if lease is None else [(one, lease) for one in extensions]
        lists = {one.name: stack.enter_context(one.observe(model, part, of)) for one, of in watching}
        yield notes
    notes.update({name: "".join(of) for name, of in lists.items() if of})


def backward(loss: BatchLoss, terms: int, scale: float = 1.0) -> Measured:
    """Add the gradient of (the losses of one micro-batch / terms)."""
    (loss.sum / max(terms, 1) * scale).backward()  # type: ignore[no-untyped-call]
    return measured(loss)


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


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """List parameters in the order of the optimizer's state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parsed(name: str) -> tuple[int, str]:
    """Parse the name of a state: the number of its parameter, and the state's own name."""
    _, number, what = name.split(".", 2)
    return int(number), what


def states_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Read the optimizer's state, by name, as float32. Empty where it cannot be saved (torchao's): it then
    begins anew, as a joiner's does."""
    found: dict[str, Tensor] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):  # state_dict wraps what bitsandbytes has
        for what, value in optimizer.state.get(parameter, {}).items():
            if type(value) not in PLAIN:
                return {}
            name, tensor = packed(what, value)
            found[f"{OPTIMIZER}.{number}.{name}"] = tensor
    return found


def load_states(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `states_of` gave; other names are passed over, and those of ranks."""
    state: dict[int, dict[str, Tensor | int]] = {}
    for name in tensors:
        if name.startswith(f"{OPTIMIZER}.") and RANK not in name:
            number, what = parsed(name)
            key, value = unpacked(what, tensors[name])
            state.setdefault(number, {})[key] = value
    load_state(optimizer, state)


def packed(what: str, value: Tensor | int | float) -> tuple[str, Tensor]:
    """Pack a value of an optimizer's state, a number or bytes, as float32 under a name that says which."""
    if isinstance(value, int):
        return f"{what}|int", torch.tensor(float(value))
    tensor = torch.as_tensor(value)
    if tensor.dtype != torch.uint8:
        return what, tensor.float()
    flat = tensor.detach().cpu().reshape(-1)
    whole = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return f"{what}|uint8|{'x'.join(map(str, tensor.shape))}", whole.view(torch.float32)


def unpacked(name: str, tensor: Tensor) -> tuple[str, Tensor | int]:
    """Reverse `packed`."""
    what, _, kind = name.partition("|")
    if kind == "int":
        return what, int(tensor)
    if not kind:
        return what, tensor
    shape = [int(size) for size in kind.removeprefix("uint8|").split("x") if size]
    return what, tensor.view(torch.uint8)[: prod(shape)].reshape(shape)


def load_state(optimizer: Optimizer, state: Mapping[int, Mapping[str, Tensor | int]]) -> None:
    """Load the state alone: groups and rates are the recipe's and the schedule's."""
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
