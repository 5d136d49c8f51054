"""Compiles the kernels for GPUs that are not here, and prints what came of it as JSON.

A process of its own: where TRITON_INTERPRET is set, there is nothing to compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compress import triton_kernels as kernels

VECTORS = {"x": "*fp32", "y": "*fp32", "units": "*i64", "out": "*fp32", "m": "i64", "shift": "i32"}
ADD = {"x": "*fp32", "at": "*i64", "values": "*fp32", "k": "i64", "alpha": "fp32"}
COUNT = {"bits": "*i32", "m": "i64", "threshold": "*i32", "counts": "*i64", "blocks": "i32"}
GATHER = {
    "bits": "*i32", "m": "i64", "threshold": "*i32", "starts": "*i64", "blocks": "i32", "quota": "*i64",
    "positions": "*i64", "patterns": "*i32", "room": "i64",
}  # fmt: skip
ESCAPES = {"positions": "*i64", "count": "*i64", "counts": "*i64"}
GAP_BYTES = {"positions": "*i64", "count": "*i64", "starts": "*i64", "out": "*u8"}
QUANTIZE = {
    "values": "*fp32", "count": "*i64", "buckets": "i64", "by_bin": "*u8", "at": "*fp32",
    "by_largest": "*i32", "codes": "*u8", "scales": "*i32",
}  # fmt: skip
DEQUANTIZE = {
    "packed": "*u8", "table": "*fp32", "scales": "*fp32", "out": "*fp32", "k": "i64", "before": "i32",
    "bucket": "i32",
}  # fmt: skip
NVIDIA = [GPUTarget("cuda", number, 32) for number in (75, 80, 90, 120)]
AMD = [GPUTarget("hip", "gfx90a", 64), GPUTarget("hip", "gfx1100", 32)]
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Assembled:
    """A kernel's assembly, PTX or that of AMD, and the bytes of stack that NVIDIA's assembler gives it."""

    text: str
    stack: int = 0


def assembled(target: GPUTarget, kernel: object, signature: dict[str, str], **constants: object) -> Assembled:
    """Compile a kernel."""
    warps = constants.pop("num_warps", 4)
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=target, options={"num_warps": warps}).asm
    if target.backend != "cuda":
        return Assembled(made["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        command = [str(OBJDUMP), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Assembled(made["ptx"], max(map(int, re.findall(r"STACK:(\d+)", told))))


def quantize(target: GPUTarget, bits: int, bucket: int) -> Assembled:
    return assembled(
        target, kernels._quantize, QUANTIZE,
        BITS=bits, BUCKET=bucket, ROWS=max(kernels.AT_ONCE // bucket, 1), STRETCH=1 < bits < 8,
        LOWEST=1, SHIFT=14, BINS=8192, BEYOND=1.25, num_warps=max(4, bucket // 512),
    )  # fmt: skip


def decoders(target: GPUTarget, bits: Iterable[int]) -> dict[str, Assembled]:
    """The kernels whose bits must be the same everywhere."""
    made = {"add": assembled(target, kernels._add, ADD, BLOCK=1024)}
    for width in bits:
        made[f"dequantize {width}"] = assembled(
            target, kernels._dequantize, DEQUANTIZE, BITS=width, BLOCK=1024
        )
    return made


def main() -> None:
    """Print what was compiled: {target: {kernel: [length, flushes denormals, bytes of stack]}}."""
    told: dict[str, dict[str, tuple[int, bool, int]]] = {}
    for target in [*NVIDIA, *AMD]:
        every = target.arch == 80
        made = decoders(target, (1, 2, 3, 4, 8, 16) if every else (4,))
        made["quantize 4, 128"] = quantize(target, 4, 128)
        made["gather"] = assembled(target, kernels._gather, GATHER, BLOCK=4096)
        if every:
            made["difference"] = assembled(target, kernels._difference, VECTORS, BLOCK=1024)
            made["count"] = assembled(target, kernels._count, COUNT, BLOCK=4096)
            made["escapes"] = assembled(target, kernels._escapes, ESCAPES, BLOCK=4096)
            made["gap bytes"] = assembled(target, kernels._gap_bytes, GAP_BYTES, BLOCK=4096)
            for bits in (1, 2, 3, 8):
                made[f"quantize {bits}, 128"] = quantize(target, bits, 128)
            for bucket in (1024, kernels.LONGEST):
                made[f"quantize 4, {bucket}"] = quantize(target, 4, bucket)
        told[f"{target.backend} {target.arch}"] = {
            name: (len(code.text), ".ftz" in code.text, code.stack) for name, code in made.items()
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
