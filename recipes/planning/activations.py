"""Trace the memory of one micro-batch without computing it: the loop's forward and backward on fake tensors.

PyTorch's fake tensors have shape, dtype and device but no data, and dispatch to the kernels that the device
would run. A mode beneath autograd counts the storage of every tensor from creation to release. Saved
activations, recomputation by checkpointing and attention masks are all counted, for any model of
transformers. Scratch memory within one kernel call is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from recipes.models import loss_sum

aten = torch.ops.aten
SCALAR = aten._local_scalar_dense.default  # `.item()` of a tensor without data gives 1
forward_flops: Any = sdpa_flop_count  # untyped
backward_flops: Any = sdpa_backward_flop_count
FLASH = aten._scaled_dot_product_flash_attention_for_cpu  # the two that torch's own table lacks
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class MicroBatch:
    """Cost of one forward and backward pass."""

    kept: int  # bytes of saved activations just before the logits
    most: int  # peak bytes, without weights and their gradients
    flops: int  # of matrix products and attention
    forward: int  # of them, those of the forward pass


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

    def _gone(self, size: int) -> None:
        self.bytes -= size


def flops_of(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> int:
    """Floating-point operations of one call of an operator."""
    if packet is FLASH:
        return int(forward_flops(*(part.shape for part in args[:3])))
    if packet is FLASH_BACKWARD:
        return int(backward_flops(*(part.shape for part in args[:4])))
    return int(flop_registry[packet](*args, **kwargs, out_val=made)) if packet in flop_registry else 0


def move(model: nn.Module) -> None:
    """Replace parameters and buffers by fake tensors on the CPU. Unlike `to_empty` it keeps weights tied."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in moved:
                fake = torch.empty_like(parameter, device="cpu")
                moved[parameter] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            setattr(module, name, moved[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))


def trace(model: nn.Module, batch: int, length: int, half: torch.dtype | None = None) -> MicroBatch:
    """Trace a micro-batch of `batch` x `length` tokens, of unequal lengths, through a model on the meta
    device, whose parameters become fake tensors. `half`: autocast dtype.

    Gradients exist beforehand, as in the training loop: the pass adds to them in place.
    """
    kept = 0

    def before_the_head(*_: object) -> None:
        nonlocal kept
        kept = kept or alive.bytes  # the first call: slices of the loss call the head again

    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    hook = head.register_forward_pre_hook(before_the_head)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move(model)
        model.train()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        names = ("input_ids", "attention_mask", "labels")
        inputs = {name: torch.zeros((batch, length), dtype=torch.int64) for name in names}
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        alive = LiveBytes(*model.parameters(), *model.buffers(), *gradients, *inputs.values())
        with alive:
            with torch.autocast("cpu", half, enabled=half is not None):
                loss, _ = loss_sum(model, inputs)
            forward = alive.flops
            loss.backward()  # type: ignore[no-untyped-call]
    hook.remove()
    return MicroBatch(kept, alive.most, alive.flops, forward)
