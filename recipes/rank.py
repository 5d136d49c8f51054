"""One of the processes that a peer is spread over: its shards of model, gradient and optimizer (FSDP2).

Of each parameter a rank holds some rows, which is a range of the vector. The parameters of a block are
gathered when it computes and let go behind it, so that a rank never holds more than its shards and a block.
What it is asked for comes from spread.py, in the peer's own process, and all ranks are asked for the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.base import quiet
from recipes.data import Sample, unpack
from recipes.flat import Layout, layout_of
from recipes.local import LOCAL, backward, batch_of, load_state, named, parameters_of, parsed
from recipes.model import loss_sum
from recipes.optim import build_optimizer, set_learning_rate
from recipes.problems import ModelError
from recipes.recipe import recipe_from_json
from recipes.shared import Shared, windows

TIMEOUT = timedelta(minutes=5)  # for the other ranks: one may still be at a long batch


@dataclass(frozen=True)
class Range:
    """Coordinates start .. stop - 1 of the vector, which this rank holds."""

    start: int
    stop: int
    values: Tensor  # (stop - start,), on the rank's device

    def within(self, start: int, stop: int) -> tuple[slice, Tensor] | None:
        """What of start .. stop - 1 it holds: where there, and the values."""
        first, last = max(start, self.start), min(stop, self.stop)
        if first >= last:
            return None
        return slice(first - start, last - start), self.values[first - self.start : last - self.start]


class Rank:
    """A rank, from its start on.

    Args:
        file: the descriptor of what it shares with the peer's process.
        store: a file in which the ranks find each other.
    """

    def __init__(self, number: int, count: int, device: str, file: int, store: str) -> None:
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
        self.own: list[Range] = []  # x_i, parameter by parameter
        self.aside: list[Range] | None = None  # x_i, while the model computes with x'

    def answer(self, asked: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Do as asked; what there is to say."""
        can: dict[str, Callable[..., dict[str, Any] | None]] = {
            "load": self.load,
            "zero": self.zero,
            "backward": self.backward,
            "clip": self.clip,
            "step": self.step,
            "common": self.with_common,
            "score": self.score,
            "own": self.with_own,
            "difference": self.difference,
            "add": self.add,
            "distance": self.distance,
            "states": self.states,
            "expect": self.expect,
            "read": self.read,
            "write": self.write,
            "bytes": self.bytes,
        }
        do = can[asked.pop("do")]
        if data:
            asked["part"] = unpack(data)
        return do(**asked) or {}

    # ---- the model -----------------------------------------------------------------------------------------

    def load(self, folder: str, recipe: str) -> dict[str, Any]:
        """The model in `folder`, x_i = x'."""
        settings = recipe_from_json(recipe)
        self.model = hollow(Path(folder), settings.model.attn_implementation)
        self.layout = layout_of(self.model)
        self.shared = Shared(self.file, self.layout.size)
        self.spread()
        self.own, self.aside = list(self.ranges()), None
        self.optimizer = build_optimizer([*self.model.parameters()], settings.training)
        at = {id(parameter): i for i, parameter in enumerate(self.model.parameters())}
        self.numbers = [at[id(parameter)] for parameter in parameters_of(self.optimizer)]
        vocabulary = getattr(self.model.config, "vocab_size", None)
        return {"parameters": self.layout.size, "numbers": self.numbers, "vocabulary": vocabulary}

    def spread(self) -> None:
        """Give each parameter its values and keep this rank's shard of it, a block at a time."""
        filled = Filled(self.model, self.layout, self.shared.common, self.device)
        blocks = set(getattr(self.model, "_no_split_modules", None) or ())
        for module in [*(m for m in self.model.modules() if type(m).__name__ in blocks), self.model]:
            filled.fill(module)
            # Root too: after an evaluation nothing of x' may be left over
            shards = fully_shard(module, mesh=self.mesh, reshard_after_forward=True)
            shards.set_gradient_divide_factor(1.0)  # the loss is divided by all tokens: gradients add up
            shards.set_force_sum_reduction_for_comms(True)

    def ranges(self) -> Iterator[Range]:
        with torch.no_grad():
            for i, parameter in enumerate(self.model.parameters()):
                yield self.range_of(i, parameter)

    def range_of(self, i: int, tensor: Any) -> Range:
        """This rank's rows of parameter i, or of what an optimizer keeps in its shape."""
        shape, values = self.layout.shapes[i], tensor.to_local().view(-1)
        rows = -(-shape[0] // self.count)
        start = self.layout.offsets[i] + min(self.number * rows, shape[0]) * prod(shape[1:])
        return Range(start, start + len(values), values)

    # ---- training ------------------------------------------------------------------------------------------

    def zero(self) -> None:
        self.model.train()
        self.optimizer.zero_grad()

    def backward(self, part: Sequence[Sample], tokens: int) -> dict[str, Any]:
        return {"loss": backward(self.model, part, tokens, self.device)}

    def clip(self, limit: float) -> dict[str, Any]:
        grads: list[Any] = [p.grad for p in self.model.parameters() if p.grad is not None]
        shards = [grad.to_local() for grad in grads]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for shard in shards:
            square += torch.linalg.vector_norm(shard, dtype=torch.float64).square()
        dist.all_reduce(square)
        norm = float(square.sqrt())
        factor = limit / (norm + 1e-6)  # as torch has it
        if 0 < factor < 1:
            for shard in shards:
                shard.mul_(factor)
        return {"norm": norm}

    def step(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()

    @torch.no_grad()
    def with_common(self) -> None:
        """The model computes with x'; x_i waits in the host's memory."""
        self.aside = [replace(held, values=held.values.to("cpu", copy=True)) for held in self.own]
        for held in self.own:
            held.values.copy_(self.shared.common[held.start : held.stop])
        self.model.eval()

    @torch.no_grad()
    def score(self, part: Sequence[Sample]) -> dict[str, Any]:
        loss, tokens = loss_sum(self.model, batch_of(part, self.device))
        return {"loss": float(loss), "tokens": tokens}

    @torch.no_grad()
    def with_own(self) -> None:
        """The model computes with x_i."""
        for held, aside in zip(self.own, self.aside or (), strict=True):
            held.values.copy_(aside.values)
        self.aside = None

    # ---- x_i -----------------------------------------------------------------------------------------------

    def difference(self, units: int, block: int) -> None:
        """x_i - x' of `block` coordinates from each of `units` on, which ascend; the window has both."""
        at, inside = self.shared.where[:units], torch.arange(block)
        for held in self.aside or self.own:
            first, last = torch.searchsorted(at, torch.tensor([held.start - block + 1, held.stop])).tolist()
            where = (at[first:last, None] + inside).view(-1)
            begin, end = torch.searchsorted(where, torch.tensor([held.start, held.stop])).tolist()
            where = where[begin:end]
            own = held.values.detach()[(where - held.start).to(held.values.device)].cpu()
            place = self.shared.values[first * block + begin : first * block + end]
            torch.sub(own, self.shared.common[where], out=place)

    @torch.no_grad()
    def add(self, count: int, alpha: int) -> None:
        """x_i += alpha * the window's values, at its coordinates, which ascend."""
        at, values = self.shared.where[:count], self.shared.values[:count]
        for held in self.own:
            first, last = torch.searchsorted(at, torch.tensor([held.start, held.stop])).tolist()
            device = held.values.device
            where, change = (at[first:last] - held.start).to(device), values[first:last].to(device)
            held.values.index_add_(0, where, change, alpha=alpha)

    @torch.no_grad()
    def distance(self) -> dict[str, Any]:
        """The square of this rank's part of the length of x_i - x'."""
        square = 0.0
        for held in self.own:
            for start, stop in windows(held.start, held.stop):
                own = held.values[start - held.start : stop - held.start].cpu()
                square += float((own - self.shared.common[start:stop]).double().square().sum())
        return {"square": square}

    # ---- what is kept --------------------------------------------------------------------------------------

    def states(self) -> dict[str, Any]:
        """What the optimizer keeps: names, with the numbers among them."""
        state = self.optimizer.state_dict()["state"]
        return {"states": {name: float(v) if v.ndim == 0 else None for name, v in named(state).items()}}

    def expect(self, states: dict[str, float | None]) -> None:
        """An optimizer that keeps these: numbers as they are, tensors for `write`."""
        parameters, state = parameters_of(self.optimizer), dict[int, dict[str, Tensor]]()
        for name, value in states.items():
            number, what = parsed(name)
            kept = torch.zeros_like(parameters[number]) if value is None else torch.tensor(value)
            state.setdefault(number, {})[what] = kept.detach()
        load_state(self.optimizer, state)

    @torch.no_grad()
    def read(self, name: str, start: int, stop: int) -> None:
        """The window <- this rank's part of coordinates start .. stop - 1 of x_i, or of a state."""
        for held in self.kept(name):
            if (found := held.within(start, stop)) is not None:
                place, values = found
                self.shared.values[place] = values.cpu()

    @torch.no_grad()
    def write(self, name: str, start: int, stop: int) -> None:
        """`read` backwards."""
        for held in self.kept(name):
            if (found := held.within(start, stop)) is not None:
                place, values = found
                values.copy_(self.shared.values[place])

    def kept(self, name: str) -> list[Range]:
        if name == LOCAL:
            return self.own
        number, what = parsed(name)
        state = self.optimizer.state[parameters_of(self.optimizer)[number]][what]
        return [self.range_of(self.numbers[number], state)]

    def bytes(self) -> dict[str, Any]:
        """What this rank holds on its device, but for activations and the block at work."""
        state = [t for of in self.optimizer.state.values() for t in of.values() if isinstance(t, Tensor)]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        parts = {"parameters": [*self.model.parameters()], "gradients": grads, "optimizer": state}
        return {what: sum(local(tensor).nbytes for tensor in held) for what, held in parts.items()}


def local(tensor: Any) -> Tensor:
    """A rank's shard, of a tensor that is sharded."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


# ---- a model without its weights --------------------------------------------------------------------------


def hollow(folder: Path, attn_implementation: str) -> Any:
    """The causal LM of the config in `folder`: parameters without memory, buffers as they should be.

    Raises:
        ModelError: where it has buffers that are learnt: its weights alone do not make it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    chosen = {} if attn_implementation == "auto" else {"attn_implementation": attn_implementation}
    try:
        with quiet(), parameters_on_meta():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **chosen
            )
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        message = f"{folder}: transformers cannot load this as a causal language model: {error}"
        raise ModelError(message) from error
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if learnt := sorted(model.state_dict().keys() - names):
        raise ModelError(f"{folder}: the buffer {learnt[0]} cannot be spread over several devices")
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside have parameters of a shape only. Not for two threads at once."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is: tied to another
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Filled:
    """Gives the parameters of a hollow model their values out of the vector."""

    def __init__(self, model: nn.Module, layout: Layout, vector: Tensor, device: torch.device) -> None:
        self.layout, self.vector, self.device = layout, vector, device
        self.waiting = {parameter: i for i, parameter in enumerate(model.parameters())}  # by identity

    def fill(self, module: nn.Module) -> None:
        """Those of `module` that have none yet. Raises ModelError where one is tied to another module's."""
        here: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for name, hollow in list(owner.named_parameters(recurse=False)):
                if not hollow.is_meta:
                    continue
                if hollow not in here:
                    if hollow not in self.waiting:
                        raise ModelError(
                            f"{name} is tied across blocks: it cannot be spread over several devices"
                        )
                    here[hollow] = self.value(self.waiting.pop(hollow))
                setattr(owner, name, here[hollow])

    def value(self, i: int) -> nn.Parameter:
        view = self.vector[self.layout.offsets[i] : self.layout.offsets[i + 1]].view(self.layout.shapes[i])
        return nn.Parameter(view.to(self.device, copy=True))
