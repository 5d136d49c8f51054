"""Read and write safetensors files tensor by tensor, without a second copy of a model in memory.

length of the header, u64 | header, JSON: name -> dtype, shape, data offsets | data
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from compress.coding import Bytes, FileSlice
from recipes.errors import ModelError
from recipes.foreign_json import parse_json

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that convert to float32 without rounding -> bytes
QUANTIZED = ("I8", "F8_E4M3", "F8_E5M2")  # codes, meaningless without their scales
TENSOR_DTYPES = {  # those that are stored, in safetensors' spelling
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float64: "F64",
}
STORED_DTYPES = {name: dtype for dtype, name in TENSOR_DTYPES.items()}
CHECK = "check"  # the word of a header that is a hash of the others
# A reader holds a header as objects, which take many times its bytes. The longest in use are of models with
# many small experts: 3 MB in 60 GB.
MAX_HEADER, HEADER_SHARE = 2 << 20, 1 << 14  # bytes, and bytes of the file for a further one
DISK_RESERVE = 256 << 20  # bytes that stay free on the disk
COPIED_AT_ONCE = 1 << 24  # elements brought to the host at a time: 64 MiB
COPY_AGAIN = "(hint: download or copy it again)"
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError, RecursionError)


@dataclass(frozen=True)
class TensorSpec:
    """The header's entry of a tensor, apart from its place in the file."""

    dtype: str  # in safetensors' spelling
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file or in memory whose bytes can be read window by window."""

    dtype: str  # in safetensors' spelling
    shape: tuple[int, ...]
    data: Bytes

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, len(self.data))

    def floats(self, start: int, stop: int) -> np.ndarray:
        """Elements start .. stop - 1 as float32: exact, since it holds every FP16 and BF16 number."""
        width = WIDTHS[self.dtype]
        raw = bytes(self.data[width * start : width * stop])
        if self.dtype == "BF16":
            widened = np.frombuffer(raw, np.dtype("<u2")).astype(np.uint32) << np.uint32(16)
            return np.asarray(widened).view(np.float32)
        return np.frombuffer(raw, "<f4" if width == 4 else "<f2").astype(np.float32, copy=False)


def stored_from_tensor(tensor: Tensor) -> StoredTensor:
    """Wrap a tensor in memory as a StoredTensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = memoryview(flat.view(torch.uint8).numpy().data)
    return StoredTensor(TENSOR_DTYPES[tensor.dtype], tuple(tensor.shape), data)


@dataclass(frozen=True)
class Header:
    """The parsed header of a safetensors file."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, dict[str, Any]]
    start: int  # of the data
    size: int  # of the whole file


def header_length(file: BinaryIO) -> int:
    """Read the length of an open file's header, and no more. Raises ValueError where none is so long."""
    room = file.seek(0, os.SEEK_END) - 8
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER + room // HEADER_SHARE, room):
        raise ValueError(f"a header of {length} bytes in a file of {room + 8}")
    return length


def read_header(file: BinaryIO, name: str) -> Header:
    """Parse the header of an open file. Errors: ModelError where it is no safetensors file."""
    try:
        length = header_length(file)
        tensors = parse_json(bytes(FileSlice(file, 8, length)))
        metadata = tensors.pop("__metadata__", {})
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors.values()]
        if min(ends, default=0) < 0:
            raise ValueError(f"a tensor that ends at byte {min(ends)}")
    except MALFORMED as error:
        raise ModelError(f"{name} is not a safetensors file: {error} {COPY_AGAIN}") from error
    return Header(metadata, tensors, 8 + length, 8 + length + max(ends, default=0))


def safetensors_header(metadata: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> bytes:
    """Header of a file that holds these tensors one after the other, in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, spec in specs.items():
        end = start + spec.size
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the format wants the data to begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def float32_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Header of a file that holds these float32 tensors. Errors: ValueError for any other dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}, expected float32")
    specs = {name: TensorSpec("F32", tuple(t.shape), 4 * t.numel()) for name, t in tensors.items()}
    return safetensors_header(metadata, specs)


def words_digest(words: Mapping[str, str]) -> str:
    """Hash the words of a header but for their hash: sha256, hex."""
    told = {name: text for name, text in words.items() if name != CHECK}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write float32 `tensors` to `path` atomically, readable by its user alone.

    Raises: OSError: for instance a full disk. The former content of `path` is intact, and nothing is left
    beside it.
    """
    part = path.with_name(path.name + ".part")  # a fixed name, so that leftovers of a kill are overwritten
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(float32_header(tensors, metadata))
            for tensor in tensors.values():
                flat = tensor.detach().reshape(-1)
                for start in range(0, flat.numel(), COPIED_AT_ONCE):
                    file.write(flat[start : start + COPIED_AT_ONCE].cpu().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if os.name != "nt":  # Windows has no handle for a folder; elsewhere the name must be on the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


@contextmanager
def safetensors_writer(
    path: Path, metadata: Mapping[str, str], specs: Mapping[str, TensorSpec]
) -> Iterator[BinaryIO]:
    """Create a safetensors file with its header; the caller writes the tensors in order. Synced at the end.

    Errors: OSError with ENOSPC before anything is written, where that can be seen.
    """
    header = safetensors_header(metadata, specs)
    check_disk_space(path.parent, len(header) + sum(spec.size for spec in specs.values()))
    with open(path, "wb") as file:
        file.write(header)
        yield file
        file.flush()
        os.fsync(file.fileno())


def open_tensors(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Find every tensor of the folder's safetensors files, as transformers would; none of `.bin` files.

    The files stay open, in `files`. Errors: ModelError.
    """
    names: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    try:
        if one := [name for name in (WEIGHTS_FILE, ADAPTER_FILE) if (folder / name).is_file()]:
            names = one[:1]
        elif (folder / WEIGHTS_INDEX).is_file():
            index = parse_json((folder / WEIGHTS_INDEX).read_bytes())
            names = sorted(set(index["weight_map"].values()))
            if strange := [name for name in names if not SHARD.fullmatch(name)]:
                # transformers would unpickle a file of any other name, in any folder
                said = f"{folder / WEIGHTS_INDEX} names {strange[0][:80]!r}, which is no safetensors file"
                raise ModelError(said, "do not use that model; download it again from where it is published")
        for name in names:
            path = folder / name
            file = files.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
            header = read_header(file, str(path))
            if header.size > path.stat().st_size:
                size = path.stat().st_size
                raise ModelError(f"{path} has {size} bytes, its header says {header.size} {COPY_AGAIN}")
            for key, entry in header.tensors.items():
                first, last = entry["data_offsets"]
                if entry["dtype"] in QUANTIZED:
                    floats = "float32, float16 or bfloat16"
                    raise ModelError(f"{path}: {key} is stored as {entry['dtype']}, expected {floats}")
                data = FileSlice(file, header.start + first, last - first)
                tensors[key] = StoredTensor(entry["dtype"], tuple(entry["shape"]), data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its weights cannot be read: {error}") from error
    return tensors


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise OSError with ENOSPC where `needed` bytes do not fit beside the reserve."""
    free = shutil.disk_usage(folder).free
    if free < needed + DISK_RESERVE:
        text = f"a model of {needed / 1e9:.2f} GB does not fit, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, text, str(folder))
