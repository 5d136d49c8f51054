"""The devices of this machine, and its names for people; GPUs by name: their memory and peak throughput.

NVIDIA's driver is asked through NVML (pynvml): its version, the GPUs, who uses them, and how hot they are.
Imports torch inside functions, most of which need none.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cocktail_cli.errors import Failure
from recipes.hardware import half_precision, host_memory, untried, usable_cores

if TYPE_CHECKING:
    from recipes.config import Recipe


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


def driver_gpus() -> list[tuple[str, int]]:
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


KINDS = ("cuda", "xpu", "mps")  # of accelerators, in the order of --device auto; ROCm's are called cuda
NUMBERED = ("cuda", "xpu")


def devices_of(kind: str) -> int:
    """Count the accelerators of a kind that torch can use."""
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    module = torch.cuda if kind == "cuda" else torch.xpu
    return module.device_count() if module.is_available() else 0


def pick_device(wanted: str) -> str:
    """Resolve `auto` to an accelerator, else cpu, and check that any other device exists.

    Raises:
        Failure: preflight, where this machine has no such device; usage, where it is no device at all.
    """
    if wanted == "auto":
        return next((f"{kind}:0" if kind in NUMBERED else kind for kind in KINDS if devices_of(kind)), "cpu")
    if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", wanted):
        raise Failure("usage", f"--device {wanted}: expected auto, cpu, mps, cuda, cuda:N, xpu or xpu:N")
    kind, _, number = wanted.partition(":")
    if kind == "cpu":
        return kind
    if int(number or 0) >= (count := devices_of(kind)):
        hints = ("--device auto takes what there is; cocktail doctor says what torch sees",)
        has = f"{count} {kind.upper()} device{'s' if count != 1 else ''}"
        raise Failure("preflight", f"--device {wanted}: this machine has {has}", hints=hints)
    return f"{kind}:{number or 0}" if kind in NUMBERED else kind


def split_devices(wanted: str) -> list[str]:
    """Split `cuda:0,1` into ["cuda:0", "cuda:1"]; `auto` into all CUDA devices, or ["auto"] without any."""
    if wanted == "auto":
        return [f"cuda:{number}" for number in range(devices_of("cuda"))] or ["auto"]
    devices = [device for device in wanted.split(",") if device]
    kind = devices[0].partition(":")[0] if devices else wanted
    return [f"{kind}:{device}" if device.isdigit() else device for device in devices] or ["auto"]


def hardware(device: str, count: int = 1) -> str:
    """Describe the device to the other peers: `NVIDIA H200, 139 GiB`, `4 x ...` or `CPU, 8 cores`."""
    if device.startswith(NUMBERED):
        properties = properties_of(device)
        times = f"{count} x " if count > 1 else ""
        return f"{times}{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if device == "mps":
        return f"Apple GPU, {platform.machine()}"
    return f"CPU, {usable_cores()} cores"


def properties_of(device: str) -> Any:
    """Return torch's properties of a numbered accelerator."""
    import torch

    module: Any = torch.xpu if device.startswith("xpu") else torch.cuda
    return module.get_device_properties(device)


@dataclass(frozen=True)
class Glance:
    """The devices that would train here, as far as they can be named without torch."""

    hardware: str
    memory: int  # bytes, of all devices together; 0: unknown


def glance(wanted: str, count: int = 1) -> Glance:
    """Look at the devices that would be picked, in milliseconds; torch has the last word on it."""
    gpus = driver_gpus() if wanted.startswith(("auto", "cuda")) else []
    if gpus:
        numbers = re.findall(r"\d+", wanted)
        first = int(numbers[0]) if numbers and int(numbers[0]) < len(gpus) else 0
        name, memory = gpus[first]
        times = f"{count} x " if count > 1 else ""
        return Glance(f"{times}{name}, {memory / 2**30:.0f} GiB", count * memory)
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    device = "mps" if wanted == "mps" or (wanted == "auto" and apple) else "cpu"
    return Glance(hardware(device), memory_of(device))


def default_peer_name() -> str:
    """Return this machine's default peer name: its host name, in small letters."""
    from transport.protocol import clean_name

    return clean_name(platform.node().partition(".")[0].lower())


CONTEXT = 512 << 20  # bytes of a GPU that the driver takes for a process, uncounted by torch


def limit_memory(devices: Sequence[str], limit: int | None) -> None:
    """Limit the memory that this process takes of each GPU. Raises Failure (preflight) where it cannot."""
    check_memory_limit(devices, limit)
    if limit is None:
        return
    import torch

    for device in sorted(set(devices)):
        share = (limit - CONTEXT) / memory_of(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def check_memory_limit(devices: Sequence[str], limit: int | None) -> None:
    """Raise Failure (preflight) where the memory of these devices cannot be limited so."""
    if limit is None:
        return
    if other := [device for device in devices if not device.startswith("cuda")]:
        hint = "leave it out: it is for GPUs of NVIDIA"
        raise Failure(
            "preflight", f"--vram-limit: {other[0]} has no memory of its own to limit", hints=(hint,)
        )
    if limit <= CONTEXT:
        hint = "give it some GiB: --vram-limit 8GiB"
        raise Failure("preflight", f"--vram-limit: {CONTEXT >> 20} MiB go to the driver alone", hints=(hint,))


def memory_of(device: str) -> int:
    """Return the bytes that a program can have on a device."""
    if device.startswith(NUMBERED):
        return int(properties_of(device).total_memory)
    return host_memory().total


def weaknesses(devices: Sequence[str], recipe: Recipe) -> Iterator[str]:
    """Say why a peer of this recipe may be slow on its devices, or behave as nobody has seen."""
    import torch

    device = devices[0]
    if len(devices) == 1 and (why := no_kernels(device)):
        yield why
    if recipe.training.bf16 is True and half_precision(torch.device(device)).dtype != torch.bfloat16:
        yield (
            f"{device} only emulates bfloat16, which this recipe insists on (training.bf16=true): it is many "
            "times slower than with training.bf16=auto, which takes float16 here"
        )
    if kind := untried(device):
        yield f"cocktail was never tried on {kind}: please report how it goes"


def no_kernels(device: str) -> str | None:
    """Say why a GPU cannot run the codec's kernels, and what that costs; None where it can."""
    import torch

    from compress import kernels_missing

    where = torch.device(device)
    if where.type != "cuda" or (why := kernels_missing(where)) is None:
        return None
    return (
        f"Triton cannot launch a kernel on {device}: {why} - this machine's processor encodes instead, which "
        "takes longer (Triton needs a C compiler and Python's headers, such as gcc and python3-dev)"
    )


GIB = 1 << 30
RUNTIME = int(0.8 * GIB)  # Python, its libraries, and on a GPU the driver's context


UNKNOWN_PIDS = (
    "this driver does not say which program uses the GPU: others are seen only while this peer is paused"
)


@dataclass(frozen=True)
class GpuReading:
    """One reading of the GPUs; None where the driver does not tell."""

    temperature: int | None = None  # degrees Celsius, of the hottest
    others: float | None = None  # share of the busiest GPU's time that other programs take


class NvidiaGpus:
    """Reads temperature and contention of the GPUs that a peer trains on, through NVML.

    Args:
        nvml: the initialised module pynvml.
        handles: one for each GPU.
        warn: called once where the driver does not tell which program uses a GPU.
    """

    def __init__(self, nvml: Any, handles: list[Any], warn: Callable[[str], None]) -> None:
        self.nvml, self.handles, self.warn = nvml, handles, warn
        self.since = [0] * len(handles)  # timestamp of the newest sample seen, microseconds
        self.warned = False

    def read(self, ours: set[int] | None) -> GpuReading:
        """Read the hottest and the busiest GPU. `ours`: process ids of this peer; None while it is paused."""
        temperatures = self.of_each(self.nvml.nvmlDeviceGetTemperature, 0)
        used = [self._others(i, ours) if ours else self._used(h) for i, h in enumerate(self.handles)]
        return GpuReading(_largest(temperatures), _largest(used))

    def of_each(self, question: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Ask NVML about each GPU; None where the driver does not tell."""
        return [self._ask(question, handle, *arguments) for handle in self.handles]

    def _used(self, handle: Any) -> float | None:
        rates = self._ask(self.nvml.nvmlDeviceGetUtilizationRates, handle)
        return None if rates is None else float(rates.gpu) / 100

    def _others(self, i: int, ours: set[int]) -> float | None:
        """Return the share that programs other than `ours` take. In a container the driver may number
        processes differently: unless it lists one of ours, none is counted as another's.
        """
        handle, nvml = self.handles[i], self.nvml
        running = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if running is None or not ours & {process.pid for process in running}:
            if not self.warned:
                self.warned = True
                self.warn(UNKNOWN_PIDS)
            return None
        samples = self._ask(nvml.nvmlDeviceGetProcessUtilization, handle, self.since[i]) or []
        self.since[i] = max([self.since[i], *(int(sample.timeStamp) for sample in samples)])
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.pid not in ours:
                shares.setdefault(sample.pid, []).append(int(sample.smUtil))
        return sum(sum(share) / len(share) for share in shares.values()) / 100

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self.nvml.NVMLError:  # not supported here, or no sample yet
            return None


def _largest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def nvidia_gpus(devices: Iterable[str], warn: Callable[[str], None]) -> NvidiaGpus | None:
    """Open the NVIDIA GPUs among `devices`; None, after a warning, where they cannot be read."""
    cuda = sorted({device for device in devices if device.startswith("cuda")})
    if not cuda:
        warn("no NVIDIA GPU trains here: limits of its heat and use have no effect")
        return None
    asked = nvml()
    if asked is None:
        why = "there is no NVML"
    else:
        try:
            return NvidiaGpus(asked, [handle_of(asked, device) for device in cuda], warn)
        except asked.NVMLError as error:
            why = str(error)
    warn(f"the NVIDIA driver cannot be asked ({why}): limits of heat and use have no effect")
    return None
