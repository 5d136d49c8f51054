"""Import this before torch: torch then has two CUDA devices that are not there (device.cpp says how they
behave).

`python -m pytest -p fake_cuda ...` does so; `-p fake_triton` runs kernels there.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

assert "torch" not in sys.modules, "fake_cuda is to be imported before torch"
os.environ["TRITON_INTERPRET"] = "1"

from build_fake_cuda import place  # noqa: E402

lib = ctypes.CDLL(str(place()), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
import torch.cuda  # noqa: E402

for name in ("fake_held", "fake_peak", "fake_allocations"):
    getattr(lib, name).restype = ctypes.c_int64
lib.fake_race.restype = ctypes.c_char_p
lib.fake_limit.argtypes = lib.fake_fail_in.argtypes = [ctypes.c_int, ctypes.c_int64]
lib.fake_resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_int64]
lib.fake_access.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]

COUNT = 2
ROOT = Path(__file__).resolve().parents[2]
cuda: Any = torch.cuda


def number(device: Any = None) -> int:
    """Return the index of a device; None: of the thread's current one."""
    if device is None:
        return int(lib.fake_device())
    if isinstance(device, int):
        return device if device >= 0 else int(lib.fake_device())
    index = torch.device(device).index
    return int(lib.fake_device()) if index is None else index


# ---- memory, for tests -------------------------------------------------------------------------------------


@dataclass
class Machine:
    """What the fake machine says of itself; tests change it."""

    total: int = 80 << 30  # bytes of memory on each device
    capability: tuple[int, int] = (8, 0)


machine = Machine()


def held(device: int = 0) -> int:
    """Return the bytes of live tensors on a device."""
    return int(lib.fake_held(device))


def peak(device: int = 0) -> int:
    """Return the most bytes that were held since `peak_from_here`."""
    return int(lib.fake_peak(device))


def peak_from_here(device: int = 0) -> int:
    """Forget earlier peaks; return what is held."""
    lib.fake_reset_peak(device)
    return held(device)


def limit(size: int, device: int = 0) -> None:
    """Let allocations beyond so many bytes fail; 0: none does."""
    lib.fake_limit(device, size)


def fail_at(n: int, device: int = 0) -> None:
    """Let the n-th allocation from now fail, once; 0: none does."""
    lib.fake_fail_in(device, n)


def allocations(device: int = 0) -> int:
    """Count the allocations so far."""
    return int(lib.fake_allocations(device))


# ---- traffic, for tests ------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Bytes to and from all devices, and reads that waited for one, by the line of the project that asked."""

    to_device: collections.Counter[str] = field(default_factory=collections.Counter)
    to_host: collections.Counter[str] = field(default_factory=collections.Counter)
    waits: collections.Counter[str] = field(default_factory=collections.Counter)
    waited: set[tuple[str, int]] = field(default_factory=set)  # threads, and the streams they waited for


counting: Traffic | None = None


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count the traffic meanwhile, in all threads."""
    global counting
    assert counting is None
    counting = Traffic()
    lib.fake_told(listener)
    try:
        yield counting
    finally:
        lib.fake_told(TOLD())
        counting = None


def told(what: int, size: int) -> None:
    if counting is None:
        return
    frame: Any = sys._getframe(1) if what >= 0 else None
    while frame is not None and not frame.f_code.co_filename.startswith(str(ROOT)):
        frame = frame.f_back
    line = "?"
    if frame is not None:
        line = f"{frame.f_code.co_filename[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
    if what == 2:
        counting.waits[line] += 1
        counting.waited.add((threading.current_thread().name, int(lib.fake_stream())))
    else:
        (counting.to_device, counting.to_host)[what][line] += size


TOLD = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64)
listener = TOLD(told)


def raise_race() -> None:
    if said := lib.fake_race():
        raise RuntimeError(f"race on the fake device: {said.decode()}")


# ---- torch.cuda --------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of a fake device."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        return super().__new__(cls, device=torch.device("cuda", number(device)), priority=priority)


class Event(torch.Event):
    """An event of a fake device."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        return super().__new__(cls, device=torch.device("cuda", number()))


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


class Properties:
    """The properties of every fake device."""

    name, multi_processor_count, uuid = "Fake GPU", 108, "fake"
    total_memory = property(lambda self: machine.total)
    major = property(lambda self: machine.capability[0])
    minor = property(lambda self: machine.capability[1])


def bf16(including_emulation: bool = True) -> bool:
    return including_emulation or machine.capability >= (8, 0)


def wait_for(device: Any = None) -> None:
    for stream in range(9):
        torch.Stream(stream_id=stream, device_index=number(device), device_type=1).synchronize()


cpu_generator: Any = torch.Generator


class Generator(cpu_generator):  # type: ignore[misc]
    """Random numbers for any device are drawn on the host."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return cpu_generator.__new__(cpu_generator, "cpu")


torch.Generator = Generator  # type: ignore[misc]
replacements = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": bf16,
    "device_count": lambda: COUNT,
    "current_device": number,
    "set_device": lambda device: lib.fake_set_device(number(device)),
    "get_device_properties": lambda device=None: Properties(),
    "get_device_name": lambda device=None: Properties.name,
    "get_device_capability": lambda device=None: machine.capability,
    "mem_get_info": lambda device=None: (machine.total - held(number(device)), machine.total),
    "memory_allocated": lambda device=None: held(number(device)),
    "max_memory_allocated": lambda device=None: peak(number(device)),
    "reset_peak_memory_stats": lambda device=None: peak_from_here(number(device)),
    "set_per_process_memory_fraction": lambda share, device=None: limit(
        int(share * machine.total), number(device)
    ),
    "empty_cache": lambda: None,
    "synchronize": wait_for,
    "Stream": Stream,
    "Event": Event,
    "stream": on_stream,
    "current_stream": lambda device=None: torch.accelerator.current_stream(
        torch.device("cuda", number(device))
    ),
    "default_stream": lambda device=None: torch.Stream(
        stream_id=0, device_index=number(device), device_type=1
    ),
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "default_generators": (Generator(), Generator()),
}
for name, replacement in replacements.items():
    setattr(cuda, name, replacement)


def resize_storage(self: Any, size: int) -> Any:
    if self.device.type != "cuda":
        return resize_on_host(self, size)
    if not lib.fake_resize_storage(self._cdata, size):
        raise torch.OutOfMemoryError(f"CUDA out of memory (fake device). Tried to resize to {size} bytes")
    return self


resize_on_host = torch.UntypedStorage.resize_
torch.UntypedStorage.resize_ = resize_storage


class CurrentDevice:
    """Stands in for torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self.wanted, self.before = number(device), -1

    def __enter__(self) -> None:
        self.before = number()
        lib.fake_set_device(self.wanted)

    def __exit__(self, *_: object) -> None:
        lib.fake_set_device(self.before)


cuda.device = CurrentDevice
raw: Any = torch._C  # what libraries that were built for CUDA ask of torch as they are imported
raw._cuda_getCurrentRawStream = lambda device=0: 0
raw._cuda_getDevice = number
raw._cuda_getDeviceCount = lambda: COUNT
