"""Triton's kernels on the fake CUDA devices: its interpreter runs them on the memory of the device.

A launch raises unless the thread's current device owns every pointer. Import this behind fake_cuda.
"""

import ctypes
import inspect
import re
from typing import Any

import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from fake_cuda import lib, number, raise_race


class WrongDevice(RuntimeError):
    """A kernel was launched on another device than that of its pointers."""


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a device tensor's memory from the host."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer(
        (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
    )
    flat = raw[: len(raw) // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def launch(self: Any, *arguments: Any, **named: Any) -> Any:
    """Run a kernel as a launch on the thread's current device and stream."""
    given = inspect.signature(self.fn).bind_partial(*arguments).arguments
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    devices = {tensor.device for tensor in tensors.values()}
    here = torch.device("cuda", number())
    if devices and devices != {here} and any(device.type == "cuda" for device in devices):
        raise WrongDevice(f"{self.fn.__name__} is launched on {here}, its pointers are of {devices}")
    if devices == {here}:
        stored = set(re.findall(r"tl\.store\((\w+)", inspect.getsource(self.fn)))
        lib.fake_kernel(here.index)
        for name, tensor in tensors.items():
            lib.fake_access(tensor.untyped_storage().data_ptr(), here.index, int(name in stored))
        raise_race()
    return interpreted(self, *arguments, **named)


def arguments_on_host(self: Any, arguments: Any, named: Any) -> Any:
    def view(value: Any) -> Any:
        return host_view(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

    return [view(value) for value in arguments], {name: view(value) for name, value in named.items()}


def patched_once(function: Any) -> Any:
    """Replace what of Triton's language a kernel uses, for good, where the interpreter does so for every call
    of a function."""
    modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
    if not modules <= patched:
        patch(function)
        patched.update(modules)
    return interpreter._LangPatchScope()  # with nothing to restore


patched: set[int] = set()
patch = interpreter._patch_lang
interpreter._patch_lang = patched_once
interpreted = interpreter.GridExecutor.__call__
interpreter.GridExecutor.__call__ = launch
interpreter.GridExecutor._init_args_hst = arguments_on_host
interpreter.GridExecutor._restore_args_dev = lambda self, *_: None


def long_blocks() -> None:
    """Let a program of the codec's kernels work on more elements: the interpreter is slow with many."""
    from compress import triton_kernels

    triton_kernels.BLOCK = triton_kernels.WIDE = triton_kernels.AT_ONCE = 1 << 15
