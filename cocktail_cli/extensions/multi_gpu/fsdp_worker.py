"""One of the processes that a peer is sharded over: its shards of model, gradient and optimizer (FSDP2).

Of each parameter a rank has some rows, which is a range of the vector. The parameters of a block are gathered
when it computes and freed behind it, so that a rank never has more than its shards and a block. Requests come
from fsdp_peer.py, in the peer's own process; all ranks get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recipes import training
from recipes.algorithm import SideStream
from recipes.config import Recipe, Training
from recipes.data import Sample, unpack_samples
from recipes.errors import ModelError
from recipes.hardware import half_precision
from recipes.models import autocast_dtype, build_on_meta, frozen_name, open_vector, trained_dtype
from recipes.objectives import measured, objective_of
from recipes.training import LINEAR, LOCAL, NOISE, OPTIMIZER, PLAIN, RANK, ModelExtension, packed, parsed
from recipes.weight_files import Layout, StoredVector, layout_of, write_safetensors

from .fsdp_peer import REQUESTS, SharedMemory, windows

# a recipe in JSON -> the recipe, and the extensions of its training
ReadRecipe = Callable[[str], tuple[Recipe, Sequence[ModelExtension]]]
TIMEOUT = timedelta(minutes=5)  # for the other ranks: one may still be at a long batch


@dataclass(frozen=True)
class Range:
    """The coordinates start .. stop - 1 of the vector, on this rank."""

    start: int
    stop: int
    values: Tensor  # (stop - start,), on the rank's device

    def within(self, start: int, stop: int) -> tuple[slice, Tensor] | None:
        """Intersect with start .. stop - 1: where there, and the values."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        return slice(first - start, last - start), self.values[first - self.start : last - self.start]


class ParameterFiller:
    """Gives the parameters of a model on the meta device their values: what is trained, out of the vector;
    the rest, of the base, as it is stored."""

    def __init__(self, model: nn.Module, layout: Layout, vector: Tensor, device: torch.device) -> None:
        self.layout, self.vector, self.device = layout, vector, device
        self.stored: StoredVector | None = None  # the base, where some of it is not trained
        self.waiting = {parameter: name for name, parameter in model.named_parameters()}  # by identity

    def fill(self, module: nn.Module) -> None:
        """Fill the parameters of `module` that have none yet. Errors: ModelError: one is tied elsewhere."""
        here: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for name, empty in list(owner.named_parameters(recurse=False)):
                if not empty.is_meta:
                    continue
                if empty not in here:
                    if empty not in self.waiting:
                        said = f"{name}, tied across blocks, cannot be spread over several devices"
                        raise ModelError(said, "--gpus 1")
                    here[empty] = self.value(self.waiting.pop(empty), empty)
                setattr(owner, name, here[empty])

    def value(self, name: str, empty: nn.Parameter) -> nn.Parameter:
        values = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        layout, flat = self.layout, values.view(-1)
        if frozen := not empty.requires_grad:
            assert self.stored is not None
            layout, name = self.stored.layout, frozen_name(self.stored, name)
        first = layout.offsets[layout.names.index(name)]
        for start, stop in windows(0, len(flat)):
            place = first + start, first + stop
            flat[start:stop] = self.of_base(*place) if frozen else self.vector[slice(*place)]
        return nn.Parameter(values, empty.requires_grad)

    def of_base(self, start: int, stop: int) -> Tensor:
        assert self.stored is not None
        return torch.from_numpy(self.stored.read(start, stop))


class FsdpWorker:
    """A rank, from its start on.

    Args:
        file: the descriptor of the memory it shares with the peer's process.
        store: a file in which the ranks find each other.
        read_recipe: reads a recipe, with its extensions.
    """

    def __init__(
        self, number: int, count: int, device: str, file: int, store: str, read_recipe: ReadRecipe
    ) -> None:
        self.number, self.count, self.device, self.file = number, count, torch.device(device), file
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.FileStore(store, count),
            rank=number,
            world_size=count,
            timeout=TIMEOUT,
        )
        self.mesh = init_device_mesh(self.device.type, (count,))
        self.read_recipe, self.extensions = read_recipe, tuple[ModelExtension, ...]()
        self.own: list[Range] = []  # x_i, parameter by parameter
        self.aside: list[Range] | None = None  # x_i, while the model computes with x'
        self.brought: dict[int, list[list[tuple[Tensor, Tensor, Tensor]]]] = {}  # x, where, values; by window
        self.awaited: dict[str, Tensor] = {}  # states of this rank's own, which are about to be written
        self.side = SideStream(self.device)
        self.answered = self.side.mark()  # the last request: x_i does not change during the one at work

    def answer(self, asked: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Call the method of a request; return its answer."""
        what = asked.pop("do")
        if data:
            asked["part"] = unpack_samples(data)
        try:
            assert what in REQUESTS
            answer: dict[str, Any] | None = getattr(self, what)(**asked)
            self.answered = self.side.mark()
            return answer or {}
        except (RuntimeError, MemoryError) as error:
            if what not in ("attempt", "backward", "score") or not training.is_full(error):
                raise
            # The others may wait for this rank in the middle of theirs. What is lost is a gradient.
            return {"full": training.first_line(error)}

    def answer_beside(self, asked: dict[str, Any]) -> None:
        """Call a method of gpu_process.BESIDE in another thread than `answer`, which may wait for a rank
        that will not come. Neither x_i nor the optimizer changes while a gradient is computed."""
        with self.side.behind(self.answered), torch.no_grad():
            getattr(self, asked.pop("do"))(**asked)

    # ---- the model -----------------------------------------------------------------------------------------

    def load(self, base: str, recipe: str) -> dict[str, Any]:
        """Load the model of the recipe, with x_i = x'; what is not trained comes from the folder `base`."""
        settings, extensions = self.read_recipe(recipe)
        self.extensions = tuple(extensions)
        self.objective = objective_of(settings)
        self.model = build_on_meta(Path(base), settings, self.device)
        self.layout = layout_of(self.model)
        self.shared = SharedMemory(self.file, self.layout.size)
        kind = trained_dtype(settings)
        if kind == torch.bfloat16 and settings.training.bf16 == "auto":
            kind = half_precision(self.device).dtype
        filled = ParameterFiller(self.model, self.layout, self.shared.global_model, self.device)
        with ExitStack() as files:
            if settings.lora is not None:
                stored = open_vector(Path(base), settings.model.trust_remote_code)
                filled.stored = files.enter_context(closing(stored))
            self.spread(filled, kind)
        self.half = half_of(settings.training, kind, self.model, self.device)
        self.scale = training.LossScale(2.0**16) if self.half == torch.float16 else training.LossScale()
        with torch.no_grad():
            self.own, self.aside = [self.range_of(i, p) for i, p in enumerate(self.trained())], None
        # To the optimizer a shard is a tensor like any other
        self.masters = [local(p).detach().requires_grad_() for p in self.trained()]
        self.optimizer = training.build_optimizer(self.masters, settings.training)
        at = {id(master): i for i, master in enumerate(self.masters)}
        self.numbers = [at[id(master)] for master in training.parameters_of(self.optimizer)]
        self.linear = settings.training.optim in LINEAR
        positions, decay = training.positions_of(self.layout), settings.training.adam_beta2
        self.noise = training.GradientNoise(positions, decay, self.device)
        self.places: dict[int, list[int]] = {}  # parameter -> those of the noise's places that lie in it
        for place, number in enumerate(training.parameters_of_places(self.layout)):
            self.places.setdefault(number, []).append(place)
        config = self.model.config
        return {
            "parameters": self.layout.size,
            "numbers": self.numbers,
            "vocabulary": getattr(config, "vocab_size", None),
            "kind": self.device.type,
            "sizes": training.sizes_of(config),
        }

    def spread(self, filled: ParameterFiller, kind: torch.dtype) -> None:
        """Give each parameter its values and keep this rank's shard of it, a block at a time."""
        half = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        policy = MixedPrecisionPolicy() if kind == torch.float32 else half
        blocks = set(getattr(self.model, "_no_split_modules", None) or ())
        for module in [*(m for m in self.model.modules() if type(m).__name__ in blocks), self.model]:
            filled.fill(module)
            # Root too: after an evaluation nothing of x' may be left over
            shards = fully_shard(module, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
            shards.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens: gradients add up
            shards.set_force_sum_reduction_for_comms(True)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def range_of(self, i: int, tensor: Any) -> Range:
        """Locate this rank's rows of parameter i, or of an optimizer's state in its shape."""
        shape, values = self.layout.shapes[i], local(tensor).view(-1)
        rows = -(-shape[0] // self.count)
        start = self.layout.offsets[i] + min(self.number * rows, shape[0]) * prod(shape[1:])
        return Range(start, start + len(values), values)

    # ---- training ------------------------------------------------------------------------------------------

    def zero(self, share: float = 1.0) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # x_i and the optimizer are what `save` may read
        self.model.train()
        self.model.zero_grad()
        self.noise.begin(share)

    @torch.no_grad()
    def sampled(self) -> Tensor:
        """Take the sample of g_i that its noise is measured on, the same on each rank."""
        sample = torch.zeros(self.noise.positions.shape, device=self.device)
        trained = self.trained()
        for i, places in self.places.items():
            held, where = self.range_of(i, trained[i].grad), self.noise.positions[places]
            here = (held.start <= where) & (where < held.stop)
            if len(held.values):
                values = held.values[(where - held.start).clamp(0, len(held.values) - 1)]
                sample[places] = torch.where(here, values.float(), 0.0)
        dist.all_reduce(sample)
        return sample

    def partly(self, done: float) -> None:
        """Note the gradient of this share of the lease's terms."""
        self.noise.partly(done, self.sampled())

    def precision(self) -> AbstractContextManager[object]:
        """Enter the precision of forward passes."""
        return torch.autocast(self.device.type, self.half, enabled=self.half is not None)

    def attempt(self, part: Sequence[Sample], terms: int, aside: float) -> dict[str, Any]:
        """Compute a gradient for nothing; answer the largest share of this rank's memory that was held."""
        size = sum(len(held.values) for held in self.own)
        self.zero()
        share = training.share_taken(self.device, aside * size, lambda: self.backward(part, terms))
        self.zero()
        return {"share": share}

    def backward(self, part: Sequence[Sample], terms: int, lease: int | None = None) -> dict[str, Any]:
        with training.observed(self.extensions, self.model, part, lease) as notes:
            with self.precision():
                loss = self.objective.loss(self.model, part, self.device)
            found = training.backward(loss, terms, self.scale.value)
        return {"loss_sum": found.loss_sum, "terms": found.terms, "figures": found.figures, "notes": notes}

    def clip(self, limit: float) -> dict[str, Any]:
        grads = [local(p.grad) for p in self.trained() if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for grad in grads:
            grad.div_(self.scale.value)
            square += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        dist.all_reduce(square)
        norm = float(square.sqrt())
        factor = limit * self.noise.sums.norms(self.noise.share) / (norm + 1e-6)  # as torch has it
        factor = min(factor, 1.0) if limit else 1.0
        if factor < 1:
            for grad in grads:
                grad.mul_(factor)
        self.noise.scaled(factor / self.scale.value)
        if self.noise.wanted:
            self.noise.take(self.sampled())
        return {"norm": norm if self.scale.held(norm) else None}

    def step(self, rate: float, beta1: float | None = None) -> None:
        longer = 1.0 if self.linear else self.noise.sums.factor
        training.set_learning_rate(self.optimizer, rate, beta1, longer)
        self.noise.observe()
        for master, parameter in zip(self.masters, self.trained(), strict=True):
            master.grad = None if parameter.grad is None else local(parameter.grad)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def use_global_model(self) -> None:
        """Let the model compute with x'; x_i waits in the host's memory."""
        self.aside = [replace(held, values=held.values.to("cpu", copy=True)) for held in self.own]
        for held in self.own:
            held.values.copy_(self.shared.global_model[held.start : held.stop])
        self.model.eval()

    @torch.no_grad()
    def score(self, part: Sequence[Sample]) -> dict[str, Any]:
        with self.precision():
            return asdict(measured(self.objective.loss(self.model, part, self.device)))

    @torch.no_grad()
    def use_local_model(self) -> None:
        """Let the model compute with x_i."""
        for held, aside in zip(self.own, self.aside or (), strict=True):
            held.values.copy_(aside.values)
        self.aside = None

    # ---- x_i -----------------------------------------------------------------------------------------------

    def difference(self, units: int, block: int) -> None:
        """Compute x_i - x' for `block` coordinates from each unit on; both are in the window."""
        at, inside = self.shared.where[:units], torch.arange(block)
        for held in near(self.aside or self.own, int(at[0]), int(at[-1]) + block):
            first, last = torch.searchsorted(at, torch.tensor([held.start - block + 1, held.stop])).tolist()
            where = (at[first:last, None] + inside).view(-1)
            begin, end = torch.searchsorted(where, torch.tensor([held.start, held.stop])).tolist()
            where = where[begin:end]
            own = taken(held.values, where - held.start)
            place = self.shared.values[first * block + begin : first * block + end]
            torch.sub(own, self.shared.global_model[where], out=place)

    def bring(self, update: int, count: int) -> None:
        """Take this rank's part of the window, whose coordinates ascend: `add` waits for all of an update."""
        at, values, parts = self.shared.where[:count], self.shared.values[:count], []
        for held in near(self.own, int(at[0]), int(at[-1]) + 1):
            first, last = torch.searchsorted(at, torch.tensor([held.start, held.stop])).tolist()
            short = torch.int32 if len(held.values) < 1 << 31 else torch.int64
            where = self.pinned((at[first:last] - held.start).to(short))
            parts.append((held.values, where, self.pinned(values[first:last].clone())))
        self.brought.setdefault(update, []).append(parts)

    def pinned(self, x: Tensor) -> Tensor:
        return x.pin_memory() if self.device.type == "cuda" else x

    @torch.no_grad()
    def add(self, update: int, count: int, alpha: int) -> dict[str, Any]:
        """x_i += alpha * an update that was brought in so many windows. Not where this rank lacks some: it
        has begun since, in place of another."""
        brought = self.brought.pop(update, [])
        if len(brought) != count:
            return {"added": False}
        for values, where, change in chain.from_iterable(brought):
            there = (part.to(values.device, non_blocking=True) for part in (where, change))
            values.index_add_(0, *there, alpha=alpha)
        return {"added": True}

    @torch.no_grad()
    def distance(self) -> dict[str, Any]:
        """Compute the square of this rank's part of |x_i - x'|."""
        square = 0.0
        for held in self.own:
            for start, stop in windows(held.start, held.stop):
                own = held.values[start - held.start : stop - held.start].cpu()
                square += float((own - self.shared.global_model[start:stop]).double().square().sum())
        return {"square": square}

    # ---- what is kept --------------------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """List the optimizer's states by name, with the numbers among them. Where a state is not a value for
        each parameter, or a number, but of 8 bits with scales: names of this rank's own, with their
        shapes. Empty where it cannot be saved: it then begins anew, as a joiner's.
        """
        found: dict[str, float | None] = {}
        for number, state in self.optimizer.state_dict()["state"].items():
            for what, value in state.items():
                same = isinstance(value, Tensor) and value.shape == self.masters[self.numbers[number]].shape
                if type(value) is Tensor and value.is_floating_point() and (same or value.ndim == 0):
                    found[f"{OPTIMIZER}.{number}.{what}"] = None if value.ndim else float(value)
                else:
                    return {"states": self.own_states()}
        return {"states": found}

    def own_states(self) -> dict[str, float | list[int]]:
        """List states as `packed` has them: a number, or the shape of what `read` gives."""
        found: dict[str, float | list[int]] = {}
        for number, parameter in enumerate(training.parameters_of(self.optimizer)):
            for what, value in self.optimizer.state.get(parameter, {}).items():
                if type(value) not in PLAIN:
                    return {}
                name, tensor = packed(what, value)
                kept = list(tensor.shape) or float(tensor)
                found[f"{OPTIMIZER}.{number}.{name}{self.mark}"] = kept
        return found

    @property
    def mark(self) -> str:
        """Suffix of the name of a state that is this rank's own, of so many."""
        return f"{RANK}{self.number}/{self.count}"

    def noise_state(self, state: list[float] | None = None) -> dict[str, Any]:
        """Restore what was measured of the gradient's noise, where it is given; answer it."""
        if state is not None:
            self.noise.load(torch.tensor(state))
        return {"state": self.noise.state().tolist()}

    def expect(self, states: dict[str, float | list[int] | None]) -> None:
        """Prepare the optimizer for these states: numbers as they are, tensors for `write`. States of a
        rank's own are awaited, until `take`."""
        state: dict[int, dict[str, Tensor | int]] = {}
        self.awaited = {}
        for name, value in states.items():
            if RANK in name:
                if name.endswith(self.mark):
                    awaited = torch.empty(value) if isinstance(value, list) else torch.tensor(value)
                    self.awaited[name] = awaited
                continue
            number, what = parsed(name)
            like = self.masters[self.numbers[number]]
            kept = torch.zeros_like(like) if value is None else torch.tensor(value)
            state.setdefault(number, {})[what] = kept.detach()
        training.load_state(self.optimizer, state)

    def take(self) -> None:
        """Load the awaited states, now written, into the optimizer."""
        kept = {name.removesuffix(self.mark): tensor for name, tensor in self.awaited.items()}
        self.awaited = {}
        training.load_states(self.optimizer, kept)

    @torch.no_grad()
    def read(self, name: str, start: int, stop: int) -> None:
        """Copy this rank's part of coordinates start .. stop - 1 of x_i, or of a state, to the window."""
        for place, values in self.kept(name, start, stop):
            self.shared.values[place] = values.cpu()

    @torch.no_grad()
    def write(self, name: str, start: int, stop: int) -> None:
        """Reverse `read`."""
        for place, values in self.kept(name, start, stop):
            values.copy_(self.shared.values[place])

    def kept(self, name: str, start: int, stop: int) -> list[tuple[slice, Tensor]]:
        """Return this rank's parts of coordinates start .. stop - 1: where there, and the values."""
        return [part for held in self.ranges(name) if (part := held.within(start, stop)) is not None]

    def ranges(self, name: str) -> list[Range]:
        if name == LOCAL:
            return self.own
        if name in self.awaited:
            return [whole(self.awaited[name])]
        number, what = parsed(name)
        state = self.optimizer.state[training.parameters_of(self.optimizer)[number]]
        if RANK not in name:
            return [self.range_of(self.numbers[number], state[what])]
        what = what.partition(RANK)[0].partition("|")[0]
        return [whole(packed(what, state[what])[1])] if name.endswith(self.mark) else []

    # ---- beginning again -----------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """Save x_i and the optimizer's state, as far as this rank has them."""
        x = {f"{LOCAL}.{i}": held.values for i, held in enumerate(self.aside or self.own)}
        x |= training.states_of(self.optimizer) | {NOISE: self.noise.state()}
        told = {"value": repr(self.scale.value), "steps": str(self.scale.steps)}
        write_safetensors(Path(path), x, told)

    @torch.no_grad()
    def restore(self, path: str) -> None:
        """Restore what a rank of the same number, among as many, has saved; after `load`."""
        with safe_open(path, "pt") as file:
            for i, held in enumerate(self.own):
                held.values.copy_(file.get_tensor(f"{LOCAL}.{i}"))
            kept = {name: file.get_tensor(name) for name in file.keys() if name.startswith(OPTIMIZER)}  # noqa: SIM118
            self.noise.load(file.get_tensor(NOISE))
            told = file.metadata()
        training.load_states(self.optimizer, kept)
        self.scale = training.LossScale(float(told["value"]), int(told["steps"]))

    def bytes(self) -> dict[str, Any]:
        """Count the bytes on the device, but for activations and the block at work."""
        state = [t for of in self.optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
        grads = [p.grad for p in self.trained() if p.grad is not None]
        parts = {"parameters": [*self.model.parameters()], "gradients": grads, "optimizer": state}
        return {what: sum(local(tensor).nbytes for tensor in held) for what, held in parts.items()}


def half_of(asked: Training, kind: torch.dtype, model: nn.Module, device: torch.device) -> torch.dtype | None:
    """Choose the precision of forward passes; None: that of the weights, which FSDP gathers in `kind`."""
    if kind == torch.float32:
        return autocast_dtype(asked, model, half_precision(device))
    if asked.fp16 or kind == torch.float16:
        return torch.float16
    return torch.bfloat16 if asked.bf16 is True else None


def whole(tensor: Tensor) -> Range:
    """Make a range of a tensor that no other rank has."""
    return Range(0, tensor.numel(), tensor.reshape(-1))


def near(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """Select the ranges with coordinates among start .. stop - 1."""
    return [held for held in ranges if held.start < stop and start < held.stop]


def taken(values: Tensor, where: Tensor) -> Tensor:
    """Gather values of a device in the host's memory; all of them, where the device has no room."""
    try:
        return values[where.to(values.device)].cpu()
    except torch.OutOfMemoryError:
        return values.cpu()[where]


def local(tensor: Any) -> Tensor:
    """Return a rank's shard of a sharded tensor; any other tensor as it is."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
