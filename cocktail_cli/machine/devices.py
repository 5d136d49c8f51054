"""The devices of this machine, and its names for people. Imports torch inside functions."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cocktail_cli.errors import Failure
from recipes.hardware import host_memory, usable_cores


def cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pick_device(wanted: str) -> str:
    """Resolve `auto` to cuda, mps or cpu, and check that any other device exists.

    Raises:
        Failure: preflight, where this machine has no such device; usage, where it is no device at all.
    """
    import torch

    if wanted == "auto":
        if torch.cuda.is_available():
            return "cuda:0"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", wanted):
        raise Failure("usage", f"--device {wanted}: expected auto, cpu, mps, cuda or cuda:N")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise Failure("preflight", "--device mps: this machine has none")
    if wanted.startswith("cuda"):
        number = int(wanted.partition(":")[2] or 0)
        if number >= (count := cuda_devices()):
            hints = ("--device auto takes what there is; cocktail doctor says what torch sees",)
            raise Failure(
                "preflight", f"--device {wanted}: this machine has {count} CUDA devices", hints=hints
            )
        return f"cuda:{number}"
    return wanted


def split_devices(wanted: str) -> list[str]:
    """Split `cuda:0,1` into ["cuda:0", "cuda:1"]; `auto` into all CUDA devices, or ["auto"] without any."""
    if wanted == "auto":
        return [f"cuda:{number}" for number in range(cuda_devices())] or ["auto"]
    devices = [device for device in wanted.split(",") if device]
    kind = devices[0].partition(":")[0] if devices else wanted
    return [f"{kind}:{device}" if device.isdigit() else device for device in devices] or ["auto"]


def pick_devices(wanted: str, count: int) -> list[str]:
    """Pick devices for the `count` processes of a peer. Raises Failure, as `pick_device` does."""
    if count == 1:
        return [pick_device(wanted)]
    if os.name == "nt":
        raise Failure("preflight", "--gpus: not on Windows, where NCCL is not")
    if wanted in ("auto", "cuda"):
        if (have := cuda_devices()) < count:
            hints = ("--device cpu tries it out on the processor",)
            raise Failure("preflight", f"--gpus {count}: this machine has {have} CUDA devices", hints=hints)
        wanted = "cuda:" + ",".join(map(str, range(count)))
    devices = [wanted] * count if wanted == "cpu" else split_devices(wanted)
    gpus = {device for device in map(pick_device, devices) if device.startswith("cuda")}
    if len(devices) != count or (len(gpus) < count and set(devices) != {"cpu"}):
        raise Failure("usage", f"--device {wanted}: expected {count} GPUs, for --gpus {count}")
    return [pick_device(device) for device in devices]


def hardware(device: str, count: int = 1) -> str:
    """Describe the device to the other peers: `NVIDIA H200, 139 GiB`, `4 x ...` or `CPU, 8 cores`."""
    if device.startswith("cuda"):
        import torch

        properties = torch.cuda.get_device_properties(device)
        times = f"{count} x " if count > 1 else ""
        return f"{times}{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device == "mps":
        return f"Apple GPU, {platform.machine()}"
    return f"CPU, {usable_cores()} cores"


@dataclass(frozen=True)
class Glance:
    """The devices that would train here, as far as they can be named without torch."""

    hardware: str
    memory: int  # bytes, of all devices together; 0: unknown


def glance(wanted: str, count: int = 1) -> Glance:
    """Look at the device that `pick_devices` would pick, in milliseconds; torch has the last word on it."""
    gpus = nvidia_gpus() if wanted.startswith(("auto", "cuda")) else []
    if gpus:
        numbers = re.findall(r"\d+", wanted)
        first = int(numbers[0]) if numbers and int(numbers[0]) < len(gpus) else 0
        name, memory = gpus[first]
        times = f"{count} x " if count > 1 else ""
        return Glance(f"{times}{name}, {memory / 2**30:.0f} GiB", count * memory)
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    device = "mps" if wanted == "mps" or (wanted == "auto" and apple) else "cpu"
    return Glance(hardware(device), memory_of(device))


def nvidia_gpus() -> list[tuple[str, int]]:
    """Ask the driver for name and bytes of each visible GPU; empty where there is none, or no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        found = [(pynvml.nvmlDeviceGetName(h), int(pynvml.nvmlDeviceGetMemoryInfo(h).total)) for h in handles]
    except Exception:  # the package is missing, or one of its many kinds of errors: torch will tell
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not re.fullmatch(r"[\d,]*", visible):
        return found
    return [found[int(number)] for number in visible.split(",") if number and int(number) < len(found)]


def default_peer_name() -> str:
    """Return this machine's default peer name: its host name, in small letters."""
    from transport.protocol import clean_name

    return clean_name(platform.node().partition(".")[0].lower())


CONTEXT = 512 << 20  # bytes of a GPU that the driver takes for a process, uncounted by torch


def limit_memory(devices: Sequence[str], limit: int | None) -> None:
    """Limit the memory that this process takes of each GPU. Raises Failure (preflight) where it cannot."""
    if limit is None:
        return
    import torch

    for device in sorted(set(devices)):
        if not device.startswith("cuda"):
            raise Failure("preflight", f"--vram-limit: {device} has no memory of its own to limit")
        share = (limit - CONTEXT) / memory_of(device)
        if share <= 0:
            raise Failure("preflight", f"--vram-limit: {CONTEXT >> 20} MiB go to the driver alone")
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def memory_of(device: str) -> int:
    """Return the bytes that a program can have on a device."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory().total
