"""A look at an NVIDIA GPU through its driver: how warm, and who else computes there. Nothing else knows NVML.

On machines without NVIDIA's driver nothing is imported and nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .lending_terms import Gauge

OWN = "this driver does not say which program uses the GPU: --only-idle sees others only while paused"


class NvidiaGpus:
    """The GPUs that a peer trains on.

    Args:
        nvml: the module pynvml, begun.
        handles: one for each GPU.
        told: hears once of what the driver does not say.
    """

    def __init__(self, nvml: Any, handles: list[Any], told: Callable[[str], None]) -> None:
        self.nvml, self.handles, self.told = nvml, handles, told
        self.since = [0] * len(handles)  # microseconds: the newest sample that was seen
        self.told_own = False

    def look(self, ours: set[int] | None) -> Gauge:
        """The warmest, and the one that others use most. `ours`: the processes of this peer; None: it does
        not train at present."""
        warm = [self.known(self.nvml.nvmlDeviceGetTemperature, h, 0) for h in self.handles]
        used = [self.others(i, ours) if ours else self.used(h) for i, h in enumerate(self.handles)]
        return Gauge(most(warm), most(used))

    def used(self, handle: Any) -> float | None:
        rates = self.known(self.nvml.nvmlDeviceGetUtilizationRates, handle)
        return None if rates is None else float(rates.gpu) / 100

    def others(self, i: int, ours: set[int]) -> float | None:
        """What programs take that are none of `ours`. In a container the driver may name processes by other
        numbers: where it does not know ours, nobody is called another."""
        handle, nvml = self.handles[i], self.nvml
        there = self.known(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        if there is None or not ours & {process.pid for process in there}:
            if not self.told_own:
                self.told_own = True
                self.told(OWN)
            return None
        samples = self.known(nvml.nvmlDeviceGetProcessUtilization, handle, self.since[i]) or []
        self.since[i] = max([self.since[i], *(int(sample.timeStamp) for sample in samples)])
        shares: dict[int, list[int]] = {}
        for sample in samples:
            if sample.pid not in ours:
                shares.setdefault(sample.pid, []).append(int(sample.smUtil))
        return sum(sum(share) / len(share) for share in shares.values()) / 100

    def known(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """The driver's answer; None where it has none."""
        try:
            return ask(*arguments)
        except self.nvml.NVMLError:  # not supported here, or no sample yet
            return None


def most(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def nvidia_gpus(devices: Iterable[str], told: Callable[[str], None]) -> NvidiaGpus | None:
    """The GPUs among `devices`; None, and `told` why, where nothing can be known of them."""
    cuda = sorted({device for device in devices if device.startswith("cuda")})
    if not cuda:
        told("no NVIDIA GPU trains here: --only-idle and --max-temp have no effect")
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return NvidiaGpus(pynvml, [pynvml.nvmlDeviceGetHandleByUUID(uuid_of(d)) for d in cuda], told)
    except Exception as error:  # the package is missing, or its errors, which are of many kinds
        told(f"the NVIDIA driver cannot be asked ({error}): --only-idle and --max-temp have no effect")
        return None


def uuid_of(device: str) -> str:
    """As the driver calls it: CUDA_VISIBLE_DEVICES makes other numbers of the same GPUs."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
