"""Trace the memory of one micro-batch without computing it: the loop's forward and backward on fake tensors.

PyTorch's fake tensors have shape, dtype and device but no data, and dispatch to the kernels that the device
would run. A mode beneath autograd counts the storage of every tensor from creation to release. Saved
activations, recomputation by checkpointing and attention masks are all counted, for any model of
transformers. Scratch memory within one kernel call is not.

Of layers that repeat few are traced instead of all. Layers are alike where all that is in them is: classes,
settings, shapes. Their order has a period: one layer in most models, two or more where kinds alternate
(sliding and full attention, every n-th layer checkpointed). Each period beyond the first adds the same bytes
and the same operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from recipes.models import layer_lists
from recipes.objectives import causal_model, loss_sum

PLACES = {"layer_idx", "layer_id", "layer_index"}  # attributes that are a layer's place and nothing else


@dataclass(frozen=True)
class RepeatedLayers:
    """A decoder's list of layers, and how few of them show what each period adds."""

    decoder: nn.Module
    name: str  # of the list in the decoder
    layers: tuple[nn.Module, ...]
    few: int  # the first layers that begin and end as all of them do
    period: int

    @property
    def left_out(self) -> int:
        """Periods that the few lack."""
        return (len(self.layers) - self.few) // self.period

    @contextmanager
    def cut(self, count: int) -> Iterator[None]:
        """Let the decoder have its first `count` layers only."""
        config: Any = self.decoder.config
        lists = {name: getattr(config, name) for name in layer_lists(config)}
        try:
            self._set(self.layers[:count], {name: values[:count] for name, values in lists.items()})
            yield
        finally:
            self._set(self.layers, lists)

    def _set(self, layers: Sequence[nn.Module], lists: Mapping[str, Any]) -> None:
        setattr(self.decoder, self.name, nn.ModuleList(layers))
        for name, value in {"num_hidden_layers": len(layers), **lists}.items():
            setattr(self.decoder.config, name, value)


def repeated_layers(causal: Any) -> RepeatedLayers | None:
    """Find the layers of a model of transformers that repeat; None: tracing all of them takes no longer."""
    decoder = causal.get_decoder() if hasattr(causal, "get_decoder") else causal
    config = getattr(decoder, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, tuple(child))
        for name, child in decoder.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1:
        return None
    [(name, layers)] = lists
    listed = [getattr(config, name) for name in layer_lists(config)]
    kinds = [(kind_of(layer), *(values[i] for values in listed)) for i, layer in enumerate(layers)]
    few, period = repetition(kinds)
    return RepeatedLayers(decoder, name, layers, few, period) if 2 * few + period < len(layers) else None


def repetition(kinds: Sequence[object]) -> tuple[int, int]:
    """Find (few, period). From some place on kinds repeat with `period`; the first `few` have those before
    it, one period and the remainder. Of all periods the one whose `few` and `few + period` are fewest.
    """
    found = []
    for period in range(1, len(kinds)):
        unlike = [i for i in range(len(kinds) - period) if kinds[i] != kinds[i + period]]
        least = max((unlike[-1] + 1 if unlike else 0) + period, 2)
        found.append((least + (len(kinds) - least) % period, period))
    return min(found, key=lambda each: 2 * each[0] + each[1], default=(len(kinds), 1))


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Describe a layer by all that decides what it computes and keeps, apart from its place."""
    return tuple((name, type(module), *settings_of(module)) for name, module in layer.named_modules())


def settings_of(module: nn.Module) -> Iterator[object]:
    for name, value in vars(module).items():
        if name not in PLACES and isinstance(value, bool | int | float | str | torch.dtype | None):
            yield name, value
    for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        yield name, tensor.shape, tensor.dtype, tensor.requires_grad


aten = torch.ops.aten
SCALAR = aten._local_scalar_dense.default  # `.item()` of a tensor without data gives 1
# torch's fake takes bfloat16 only, its kernels take float32 as well; before torch 2.8 there is none
EXPERTS = getattr(aten, "_grouped_mm", None)
forward_flops: Any = sdpa_flop_count  # untyped
backward_flops: Any = sdpa_backward_flop_count
FLASH = aten._scaled_dot_product_flash_attention_for_cpu  # the two that torch's own table lacks
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class MicroBatch:
    """Cost of one forward and backward pass. Bytes are without weights and their gradients."""

    kept: int  # bytes of saved activations just before the logits
    saved: int  # bytes when the backward pass begins: autocast has freed its copies of weights
    peak_forward: int  # bytes
    peak_layers: int  # of the backward pass down to the first layer
    peak_embedding: int  # of the rest of it; 0 where the embedding is frozen
    flops: int  # of matrix products and attention
    forward: int  # of them, those of the forward pass

    @property
    def most(self) -> int:
        """Peak bytes."""
        return max(self.peak_forward, self.peak_layers, self.peak_embedding)

    def extrapolate(self, more: MicroBatch, times: int) -> MicroBatch | None:
        """Add `times` what a pass with one period of layers more has more than this one.

        None where that is not exact: a peak is at the last layers, and grows as what is alive there, or
        behind all layers, and does not grow. A peak elsewhere may be another one's where layers are many.
        """
        grown = MicroBatch(*(b - a for a, b in zip(astuple(self), astuple(more), strict=True)))
        if (grown.peak_forward, grown.peak_layers, grown.peak_embedding) != (grown.kept, grown.saved, 0):
            return None
        return MicroBatch(*(a + times * b for a, b in zip(astuple(self), astuple(grown), strict=True)))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages that are made while it is active, and floating-point operations."""

    def __init__(self, *before: Tensor) -> None:
        """`before`: existing tensors, whose views are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.most = self.flops = 0
        self._known: Any = WeakIdKeyDictionary()
        for tensor in before:
            self._known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is SCALAR:
            return 1
        if func.overloadpacket is EXPERTS:
            halves = (part.to(torch.bfloat16) for part in args[:2])
            made = func(*halves, *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.flops += flops_of(func.overloadpacket, args, kwargs or {}, made)
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        weakref.finalize(storage, self._gone, size)
        self.bytes += size
        self.most = max(self.most, self.bytes)

    def peak(self) -> int:
        """The most bytes since the last call."""
        peak, self.most = self.most, self.bytes
        return peak

    def _gone(self, size: int) -> None:
        self.bytes -= size


def flops_of(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> int:
    """Floating-point operations of one call of an operator."""
    if packet is FLASH:
        return int(forward_flops(*(part.shape for part in args[:3])))
    if packet is FLASH_BACKWARD:
        return int(backward_flops(*(part.shape for part in args[:4])))
    if packet is EXPERTS:
        left, right = args[:2]  # one of three dimensions has a matrix an expert
        each = left.numel() // left.shape[0] if left.ndim == 3 and right.ndim == 2 else left.numel()
        return int(2 * each * right.shape[-1])
    return int(flop_registry[packet](*args, **kwargs, out_val=made)) if packet in flop_registry else 0


def move(model: nn.Module, moved: dict[Tensor, Tensor]) -> None:
    """Replace parameters and buffers by fake tensors on the CPU. Unlike `to_empty` it keeps weights tied.
    `moved`: what parameters are replaced by already."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in moved and not isinstance(parameter, FakeTensor):
                fake = torch.empty_like(parameter, device="cpu")
                moved[parameter] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            setattr(module, name, moved.get(parameter, parameter))
        for name, buffer in module.named_buffers(recurse=False):
            if not isinstance(buffer, FakeTensor):
                setattr(module, name, torch.empty_like(buffer, device="cpu"))


def trace(model: nn.Module, batch: int, length: int, half: torch.dtype | None = None) -> MicroBatch:
    """Trace a micro-batch of `batch` x `length` tokens, of unequal lengths, through a model on the meta
    device, whose parameters become fake tensors. `half`: autocast dtype.

    Of layers that repeat as few are traced as give the same result.
    """
    repeated = repeated_layers(causal_model(model))
    moved: dict[Tensor, Tensor] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        if repeated is not None:
            with repeated.cut(repeated.few + repeated.period):
                move(model, moved)
                more = trace_pass(model, batch, length, half)
            with repeated.cut(repeated.few):
                few = trace_pass(model, batch, length, half)
            whole = few.extrapolate(more, repeated.left_out)
            if whole is not None:
                return whole
        move(model, moved)
        return trace_pass(model, batch, length, half)


def trace_pass(model: nn.Module, batch: int, length: int, half: torch.dtype | None) -> MicroBatch:
    """Run the forward and backward pass of a model of fake tensors.

    Gradients exist beforehand, as in the training loop: the pass adds to them in place.
    """
    kept = peak_layers = 0

    def before_the_head(*_: object) -> None:
        nonlocal kept
        kept = kept or alive.bytes  # the first call: slices of the loss call the head again

    def behind_the_layers(_: Tensor) -> None:
        nonlocal peak_layers
        peak_layers = alive.peak()

    def behind_the_embedding(module: object, given: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(behind_the_layers)  # type: ignore[no-untyped-call]

    inner: Any = model
    hooks = [
        inner.get_output_embeddings().register_forward_pre_hook(before_the_head),
        inner.get_input_embeddings().register_forward_hook(behind_the_embedding),
    ]
    model.train()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    names = ("input_ids", "attention_mask", "labels")
    inputs = {name: torch.zeros((batch, length), dtype=torch.int64) for name in names}
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    alive = LiveBytes(*model.parameters(), *model.buffers(), *gradients, *inputs.values())
    with alive:
        with torch.autocast("cpu", half, enabled=half is not None):
            loss, _ = loss_sum(model, inputs)
        forward, saved, peak_forward = alive.flops, alive.bytes, alive.peak()
        loss.backward()  # type: ignore[no-untyped-call]
    rest = alive.peak()
    for hook in hooks:
        hook.remove()
    backward = (peak_layers, rest) if peak_layers else (rest, 0)
    return MicroBatch(kept, saved, peak_forward, *backward, alive.flops, forward)
