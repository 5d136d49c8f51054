"""Compiles every kernel to PTX for an NVIDIA GPU of compute capability 8.0 and prints {name: length} as JSON.

A process of its own: where TRITON_INTERPRET is set, there is nothing to compile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from compress.backends.triton import code_kernels as codes
from compress.backends.triton import selection_kernels as select
from compress.backends.triton import vector_kernels as vectors

VECTORS = {"x": "*fp32", "y": "*fp32", "units": "*i64", "out": "*fp32", "m": "i64", "shift": "i32"}
ADD = {"x": "*fp32", "at": "*i64", "values": "*fp32", "k": "i64", "alpha": "fp32"}
COUNT = {"bits": "*i32", "m": "i64", "low": "i32", "counts": "*i64"}
GATHER = {"bits": "*i32", "m": "i64", "low": "i32", "starts": "*i64", "positions": "*i64", "values": "*i32"}
QUANTIZE = {
    "values": "*fp32", "k": "i64", "buckets": "i64", "by_bin": "*u8", "at": "*fp32", "codes": "*u8",
    "scales": "*i32",
}  # fmt: skip
DEQUANTIZE = {
    "packed": "*u8",
    "table": "*fp32",
    "scales": "*fp32",
    "out": "*fp32",
    "k": "i64",
    "before": "i32",
    "bucket": "i32",
}


def ptx(kernel: object, signature: dict[str, str], **constants: object) -> int:
    """Length of the PTX."""
    types = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return len(triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"])


def main() -> None:
    """All kernels, the two of `codes` at every width."""
    sizes = {
        "difference": ptx(vectors._difference, VECTORS, BLOCK=1024),
        "add": ptx(vectors._add, ADD, BLOCK=1024),
        "count": ptx(select._count, COUNT, BLOCK=4096),
        "gather": ptx(select._gather, GATHER, BLOCK=4096),
    }
    for bits in (1, 2, 3, 4, 8):
        sizes[f"quantize {bits}"] = ptx(
            codes._quantize, QUANTIZE,
            BITS=bits, BUCKET=128, ROWS=8, BY_LARGEST=bits == 8, STRETCH=1 < bits < 8,
            LOWEST=1, SHIFT=14, BINS=8192, BEYOND=1.25,
        )  # fmt: skip
    for bits in (1, 2, 3, 4, 8, 16):
        sizes[f"dequantize {bits}"] = ptx(codes._dequantize, DEQUANTIZE, BITS=bits, BLOCK=1024)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
