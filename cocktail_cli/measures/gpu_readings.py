"""Readings of the GPUs that a peer trains on, through NVML: heat, and other programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cocktail_cli.machine import handle_of, nvml

UNKNOWN_PIDS = (
    "this driver does not say which program uses the GPU: --only-idle sees others only while paused"
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
        warn("no NVIDIA GPU trains here: --only-idle and --max-temp have no effect")
        return None
    asked = nvml()
    if asked is None:
        why = "there is no NVML"
    else:
        try:
            return NvidiaGpus(asked, [handle_of(asked, device) for device in cuda], warn)
        except asked.NVMLError as error:
            why = str(error)
    warn(f"the NVIDIA driver cannot be asked ({why}): --only-idle and --max-temp have no effect")
    return None
