"""The weights of a model folder as they lie on the disk: one vector of P numbers, read a window at a time.

A safetensors file begins with the length of its header (8 bytes) and the header (JSON: name -> dtype, shape,
place), so any part of any tensor can be read alone. Where its names and shapes are those of the model that
transformers builds, no model is ever loaded. Where they are not (names that transformers translates, `.bin`),
it is loaded as usual, and the vector then lies in memory.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import nn

from compress.packet import Bytes, InFile
from recipes.downloads import CODE_FILES, from_pretrained_options
from recipes.errors import ModelError

from .model_folder import check_model_folder, quiet_transformers
from .parameter_layout import Layout, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}  # what becomes FP32 without a rounding -> bytes
CODES = ("I8", "F8_E4M3", "F8_E5M2")  # of quantized weights, which mean nothing without their scales
LONGEST = 100 << 20  # bytes of a header, at most


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as it is stored."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    data: Bytes

    @property
    def kind(self) -> TensorSpec:
        return TensorSpec(self.dtype, self.shape, len(self.data))


@dataclass(frozen=True)
class TensorSpec:
    """What a header says of a tensor beside its place."""

    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass
class StoredVector:
    """The trained parameters of a model, and what else lies beside them. Close it."""

    layout: Layout
    names: tuple[str, ...]  # as they are stored; transformers may have others by now
    parts: tuple[StoredTensor, ...]  # in the order of the layout
    others: Mapping[str, StoredTensor]  # buffers
    files: ExitStack = field(default_factory=ExitStack)
    on_disk: bool = True  # False: the model was loaded, and lies in memory
    texts: Mapping[str, str] = field(default_factory=dict)  # what stands beside it in a model folder
    file: str = WEIGHTS_FILE  # what it is called there
    tied: Mapping[str, str] = field(
        default_factory=dict
    )  # further names of parameters -> theirs in the layout

    def part(self, name: str) -> StoredTensor:
        """The parameter of this name in the model, in any of its names. Errors: ModelError."""
        name = self.tied.get(name, name)
        if name not in self.layout.names:
            raise ModelError(f"the model has no parameter {name}")
        return self.parts[self.layout.names.index(name)]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Elements start .. stop - 1, (stop - start,) float32, a copy."""
        out = np.empty(stop - start, np.float32)
        offsets = self.layout.offsets
        which = bisect_right(offsets, start) - 1
        done = start
        while done < stop:
            begins, ends = offsets[which], min(offsets[which + 1], stop)
            if done < ends:
                out[done - start : ends - start] = _floats(self.parts[which], done - begins, ends - begins)
                done = ends
            which += 1
        return out

    def close(self) -> None:
        self.files.close()


def open_vector(folder: Path, code: bool = False) -> StoredVector:
    """The weights in a model folder, in the order of its parameters. Errors: ModelError."""
    check_model_folder(folder)
    model = meta_model(folder, code=code)
    layout = layout_of(model)
    with ExitStack() as files:
        tensors = open_tensors(folder, files)
        opened = files.pop_all()
    called = _called(model, list(tensors))
    tied = tied_names(model)
    fits = all(
        name in called and tensors[called[name]].shape == shape and tensors[called[name]].dtype in WIDTH
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    )
    if not fits or tied.keys() & called.keys():  # a tied weight that is stored twice may be no tied one
        opened.close()
        return _loaded(folder, code)
    names = tuple(called[name] for name in layout.names)
    others = {name: tensor for name, tensor in tensors.items() if name not in set(names)}
    parts = tuple(tensors[name] for name in names)
    return StoredVector(
        layout, names, parts, others, opened, texts=model_config_files(folder, code), tied=tied
    )


def model_config_files(folder: Path, code: bool = False) -> dict[str, str]:
    """What makes weights in FP32 a model: the config of the model in `folder`, and its code where that is
    trusted, by name of the file.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = "float32"
    own = folder.glob(CODE_FILES) if code else ()
    texts = {file.name: file.read_text(encoding="utf-8") for file in own}
    texts["config.json"] = json.dumps(config, indent=2) + "\n"
    if (folder / "generation_config.json").is_file():
        texts["generation_config.json"] = (folder / "generation_config.json").read_text(encoding="utf-8")
    return texts


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the name that the layout has."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def meta_model(folder: Path, kind: torch.dtype | None = None, code: bool = False) -> PreTrainedModel:
    """The model of the config in `folder`, names and shapes only, on the meta device; its weights of `kind`,
    or as the config has it. Errors: ModelError.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    told = from_pretrained_options(folder, code)
    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, **told)
            chosen: dict[str, Any] = {} if kind is None else {"dtype": kind}
            return AutoModelForCausalLM.from_config(config, trust_remote_code=code, **chosen)
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        message = f"{folder}: transformers cannot load this as a causal language model: {error}"
        raise ModelError(message) from error


def _called(model: PreTrainedModel, stored: Sequence[str]) -> dict[str, str]:
    """Name in the model -> name in the file, for the weights that transformers loads without computing."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        wanted: Any = model.state_dict()
        rules = get_model_conversion_mapping(model)
        renames = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        computed = [rule for rule in rules if isinstance(rule, WeightConverter)]
        called: dict[str, str] = {}
        for name in stored:
            new, converted = rename_source_key(name, renames, computed, model.base_model_prefix, wanted)
            if new not in wanted and name in wanted:
                new, converted = name, None
            if converted is None and called.setdefault(new, name) != name:
                return {}  # two for one
        return called
    except (ImportError, TypeError, AttributeError):  # not these functions in this version of transformers
        return {name: name for name in stored}


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of itself."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, dict[str, Any]]
    start: int  # of the data
    size: int  # of the whole file


def read_header(file: BinaryIO, name: str) -> Header:
    """Errors: ModelError where the file is no safetensors file."""
    room = file.seek(0, os.SEEK_END) - 8
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    try:
        if not 2 <= length <= min(LONGEST, room):
            raise ValueError(f"a header of {length} bytes")
        tensors = json.loads(bytes(InFile(file, 8, length)))
        metadata = tensors.pop("__metadata__", {})
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors.values()]
        if min(ends, default=0) < 0:
            raise ValueError(f"a tensor that ends at byte {min(ends)}")
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        OSError,
        RecursionError,
    ) as error:
        raise ModelError(f"{name} is not a safetensors file: {error}") from error
    return Header(metadata, tensors, 8 + length, 8 + length + max(ends, default=0))


def safetensors_header(metadata: Mapping[str, str], tensors: Mapping[str, TensorSpec]) -> bytes:
    """Header of a file that holds these tensors one after the other, in this order."""
    told: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.size
        told[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)  # the data begin at a multiple of 8, as the format wants it
    return len(text).to_bytes(8, "little") + text


def open_tensors(folder: Path, files: ExitStack) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files, as transformers would look for them; none for .bin.

    The files stay open, in `files`. Errors: ModelError.
    """
    names: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    try:
        if one := [name for name in (WEIGHTS_FILE, ADAPTER_FILE) if (folder / name).is_file()]:
            names = one[:1]
        elif (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
        for name in names:
            path = folder / Path(name).name
            file = files.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
            header = read_header(file, str(path))
            if header.size > path.stat().st_size:
                raise ModelError(f"{path} has {path.stat().st_size} bytes, its header says {header.size}")
            for key, told in header.tensors.items():
                first, last = told["data_offsets"]
                if told["dtype"] in CODES:
                    floats = "float32, float16 or bfloat16"
                    raise ModelError(f"{path}: {key} is stored as {told['dtype']}, expected {floats}")
                data = InFile(file, header.start + first, last - first)
                tensors[key] = StoredTensor(told["dtype"], tuple(told["shape"]), data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}: its weights cannot be read: {error}") from error
    return tensors


def _loaded(folder: Path, code: bool) -> StoredVector:
    from recipes.models import load_model

    model = load_model(folder, code=code)
    layout = layout_of(model)
    tensors = {name: stored_from_tensor(tensor) for name, tensor in model.state_dict().items()}
    tied = tied_names(model)
    others = {name: tensor for name, tensor in tensors.items() if name not in {*layout.names, *tied}}
    parts = tuple(tensors[name] for name in layout.names)
    return StoredVector(
        layout, layout.names, parts, others, on_disk=False, texts=model_config_files(folder, code), tied=tied
    )


def stored_from_tensor(tensor: torch.Tensor) -> StoredTensor:
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"}
    kinds |= {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float64: "F64"}
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return StoredTensor(
        kinds[tensor.dtype], tuple(tensor.shape), memoryview(flat.view(torch.uint8).numpy().data)
    )


def _floats(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Elements of a stored tensor as FP32: exact, since FP32 holds every FP16 and BF16 number."""
    width = WIDTH[tensor.dtype]
    assert len(tensor.data) == width * prod(tensor.shape)
    raw = bytes(tensor.data[width * start : width * stop])
    if tensor.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(raw, "<f4" if width == 4 else "<f2").astype(np.float32, copy=False)
