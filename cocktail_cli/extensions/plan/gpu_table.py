"""GPUs by name: their memory and peak throughput; and the device of this machine, measured."""

from __future__ import annotations

import difflib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure
from cocktail_cli.machine import GIB, memory_of
from recipes.hardware import half_precision

if TYPE_CHECKING:
    import torch

SMALLEST, LARGEST = 768, 12288  # sides of the matrices that are multiplied


@dataclass(frozen=True)
class Gpu:
    """One device. Peaks are those of data sheets: dense, FP32 accumulation, in TFLOP/s."""

    name: str
    memory: float  # GiB that a program can have
    half: float  # bfloat16, or float16 where bfloat16 is emulated
    single: float  # float32, as PyTorch computes it where nobody asks for TF32
    bf16: bool = True  # False: bfloat16 is emulated, at the speed of float32

    @property
    def bytes(self) -> int:
        return int(self.memory * GIB)

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s in this dtype."""
        slow = dtype == "float32" or (dtype == "bfloat16" and not self.bf16)
        return 1e12 * (self.single if slow else self.half)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", 39.4, 312, 19.5),
        Gpu("a100-80g", 79.1, 312, 19.5),
        Gpu("h100-80g", 79.1, 989, 67),
        Gpu("h200-141g", 139.7, 989, 67),
        Gpu("b200-180g", 178.0, 2250, 75),
        Gpu("l4-24g", 22.0, 121, 30.3),
        Gpu("l40s-48g", 44.4, 362, 91.6),
        Gpu("a10g-24g", 22.0, 70, 31.5),
        Gpu("a6000-48g", 47.4, 155, 38.7),
        Gpu("t4-16g", 14.6, 65, 8.1, bf16=False),
        Gpu("v100-32g", 31.7, 125, 15.7, bf16=False),
        Gpu("rtx-3060-12g", 11.6, 25.5, 12.7),
        Gpu("rtx-3090-24g", 23.6, 71, 35.6),
        Gpu("rtx-4060ti-16g", 15.6, 44, 22),
        Gpu("rtx-4090-24g", 23.6, 165, 82.6),
        Gpu("rtx-5090-32g", 31.4, 209, 104.8),
    )
}


def gpu_of(name: str) -> Gpu:
    """Find a device by name; its size may be omitted where that is unique. Raises Failure (usage)."""
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    fits = [gpu for key, gpu in GPUS.items() if key == wanted or key.rpartition("-")[0] == wanted]
    if len(fits) == 1:
        return fits[0]
    near = difflib.get_close_matches(wanted, GPUS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(GPUS)}"
    raise Failure("usage", f"--gpu {name}: no such device", hints=(hint,))


def this_machine(device: str) -> Gpu:
    """Describe the device that trains here, its throughput measured in some tenths of a second."""
    import torch

    here = half_precision(torch.device(device))
    fast = measured(device, here.dtype if here.pays else torch.float32)
    bf16 = here.dtype == torch.bfloat16
    return Gpu(device, memory_of(device) / GIB, fast, measured(device, torch.float32), bf16)


def measured(device: str, dtype: torch.dtype) -> float:
    """Measure the TFLOP/s of a matrix product, the best of three: of the first that takes a hundredth of a
    second, or the largest."""
    import torch

    n, best = SMALLEST // 2, 0.0
    while best < 0.01 and n < LARGEST:
        n, best = 2 * n, math.inf
        a = torch.ones(n, n, dtype=dtype, device=device)
        for _ in range(3):
            started = time.perf_counter()
            float((a @ a)[0, 0])  # waits for the device
            best = min(best, time.perf_counter() - started)
    return 2 * n**3 / best / 1e12
