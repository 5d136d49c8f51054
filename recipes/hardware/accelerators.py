"""The half precision of accelerators, and the platforms that nobody has tried cocktail on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
