"""The memory and the cores that this process can have, and the half precision of accelerators. Imports no
torch.

psutil tells what the machine has, on Linux, Windows and macOS; it knows nothing of cgroups. Docker,
Kubernetes, Slurm and systemd set those, and the limits of all groups from this process's own up to the root
hold. In a container without a cgroup namespace the path names folders that cannot be seen, and the mount is
the container's own group.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

MOUNT = Path("/sys/fs/cgroup" if sys.platform == "linux" else os.devnull)
OWN = Path("/proc/self/cgroup" if sys.platform == "linux" else os.devnull)


@dataclass(frozen=True)
class HostMemory:
    """Main memory, in bytes."""

    total: int  # of the machine, or the lowest limit on this process
    free: int  # what more can be had; the system's file cache counts as free


CGROUPS = (  # controller, files of its limit and of its use, line of memory.stat: file cache that can go
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    ("", "memory.max", "memory.current", "inactive_file"),
)


def host_memory(mount: Path = MOUNT, own: Path = OWN) -> HostMemory:
    """Measure the memory of this process.

    Args:
        mount: where cgroups are mounted.
        own: file that names the groups of this process.
    """
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for controller, most, use, cache in CGROUPS:
        for group in groups(controller, mount, own):
            limit = number_in(group / most)
            if limit is not None:
                used = (number_in(group / use) or 0) - cached_in(group / "memory.stat", cache)
                total, free = min(total, limit), min(free, limit - used)
    return HostMemory(total, max(0, free))


def usable_cores(mount: Path = MOUNT, own: Path = OWN) -> int:
    """Count the cores that this process can use, at least 1: by its affinity and the quotas on its groups."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for group in groups("cpu", mount, own):
        quota, period = number_in(group / "cpu.cfs_quota_us"), number_in(group / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            cores = min(cores, quota / period)
    for group in groups("", mount, own):
        words = text_of(group / "cpu.max").split()  # "200000 100000", or "max 100000"
        if len(words) == 2 and words[0].isdigit():
            cores = min(cores, int(words[0]) / int(words[1]))
    return max(1, math.ceil(cores))


def groups(controller: str, mount: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, its own first, the root last.

    Args:
        controller: of version 1; "": version 2, which has one hierarchy for all.
    """
    for line in text_of(own).splitlines():  # number:controllers:path
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(controller, *parts[:depth])


def number_in(file: Path) -> int | None:
    """Read a number; None where the file is missing or says `max`."""
    text = text_of(file).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def cached_in(file: Path, name: str) -> int:
    lines = (line.split() for line in text_of(file).splitlines())
    return next((int(line[1]) for line in lines if line[:1] == [name] and len(line) == 2), 0)


def text_of(file: Path) -> str:
    """Read a small file of the kernel; "" where it is not there or not ours to read."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


# ---- accelerators ------------------------------------------------------------------------------------------

TENSOR_CORES = (7, 0)  # compute capability from which float16 is faster than float32


@dataclass(frozen=True)
class HalfPrecision:
    """The number format of 16 bits that a device computes in."""

    dtype: torch.dtype  # bfloat16, or float16 where the device only emulates bfloat16
    pays: bool  # matrix products are faster than in float32


def half_precision(device: torch.device) -> HalfPrecision:
    """Return the half precision of a device. NVIDIA's GPUs before compute capability 8.0 (T4, V100, RTX 20)
    emulate bfloat16, at the speed of float32 or less; so does Apple's MPS before macOS 14."""
    import torch

    native, pays = True, device.type in ("cuda", "xpu")
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        pays = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= TENSOR_CORES
    elif device.type == "xpu":
        native = torch.xpu.is_bf16_supported()
    elif device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    return HalfPrecision(torch.bfloat16 if native else torch.float16, pays)


def untried(device: str) -> str | None:
    """Name the platform of a device where cocktail follows its documentation alone; None: it was tried."""
    import torch

    kind = device.partition(":")[0]
    names = {"xpu": "Intel's XPU", "mps": "Apple's MPS"}
    return "AMD's ROCm" if kind == "cuda" and torch.version.hip is not None else names.get(kind)
