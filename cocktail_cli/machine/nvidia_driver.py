"""NVIDIA's driver, asked through NVML (pynvml): its version, the GPUs, who uses them. Needs no torch."""

from __future__ import annotations

import os
import re
from typing import Any


def nvml() -> Any | None:
    """Return the module pynvml, initialised; None where it is not installed, or there is no driver."""
    try:
        import pynvml
    except ImportError:  # macOS, for which NVIDIA has no driver
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no library, no driver, or another version than the kernel's
        return None
    return pynvml


def driver_version() -> str | None:
    """Return the version of the driver; None without one."""
    asked = nvml()
    return None if asked is None else str(asked.nvmlSystemGetDriverVersion())


def nvidia_gpus() -> list[tuple[str, int]]:
    """Return name and bytes of each visible GPU; empty where there is none, or no driver."""
    asked = nvml()
    if asked is None:
        return []
    try:
        handles = [asked.nvmlDeviceGetHandleByIndex(i) for i in range(asked.nvmlDeviceGetCount())]
        found = [
            (str(asked.nvmlDeviceGetName(h)), int(asked.nvmlDeviceGetMemoryInfo(h).total)) for h in handles
        ]
    except asked.NVMLError:  # a GPU that fell off its bus, or is split into instances: torch will tell
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not re.fullmatch(r"[\d,]*", visible):
        return found
    return [found[int(number)] for number in visible.split(",") if number and int(number) < len(found)]


def handle_of(asked: Any, device: str) -> Any:
    """Return NVML's handle of a torch device, by UUID: CUDA_VISIBLE_DEVICES renumbers the GPUs for torch, not
    for the driver. Raises NVMLError."""
    import torch

    return asked.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def users_of(device: str) -> list[str]:
    """Describe the programs that hold memory of a GPU: `python (4711) 3.2 GiB`, those that hold most first.
    Empty where the driver does not tell, as in a container or on Windows."""
    import psutil

    asked = nvml()
    if asked is None:
        return []
    try:
        running = asked.nvmlDeviceGetComputeRunningProcesses(handle_of(asked, device))
    except asked.NVMLError:
        return []
    held = sorted(((process.usedGpuMemory or 0, process.pid) for process in running), reverse=True)
    found = []
    for size, pid in held:
        try:
            name = psutil.Process(pid).name()
        except psutil.Error:  # of another user, or of another container
            name = "a program"
        found.append(f"{name} ({pid}) {size / 2**30:.1f} GiB")
    return found
