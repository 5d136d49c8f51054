"""Weights as one vector, in memory and on disk: CocktailSGD knows no layers, x, x' and every packet are
vectors.

`Layout` has the places of a model's trainable parameters in such a vector. Safetensors files are read and
written tensor by tensor, without a second copy of a model in memory:

    length of the header, u64 | header, JSON: name -> dtype, shape, data offsets | data

`StoredVector` reads a model folder window by window. Where the names and shapes in its files are those of the
model that transformers builds, no model is ever loaded. Otherwise (`.bin` files, names that transformers
translates) the caller loads it, and the vector lies in memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import textwrap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from compress import fingerprint
from compress.coding import Bytes, FileSlice
from recipes.downloads import CODE_FILES, DISK_RESERVE, from_pretrained_options
from recipes.errors import ModelError
from recipes.foreign_json import LFS_POINTER, parse_json, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """Places of the parameters in the vector: `named_parameters` order, tied weights once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter, and P at the end: len(names) + 1 numbers."""
        return tuple(accumulate((prod(shape) for shape in self.shapes), initial=0))

    @property
    def size(self) -> int:
        """P, the number of trainable parameters."""
        return self.offsets[-1]

    def name_at(self, index: int) -> str:
        """Name of the parameter at coordinate `index`."""
        if not 0 <= index < self.size:
            raise IndexError(f"coordinate {index} of {self.size}")
        return self.names[bisect_right(self.offsets, index) - 1]

    def check(self, vector: Tensor) -> None:
        if vector.shape != (self.size,):
            raise ModelError(f"vector of shape {tuple(vector.shape)}, the model has {self.size} parameters")

    def views(self, vector: Tensor) -> list[Tensor]:
        """(P,) -> one view for each parameter, in order."""
        self.check(vector)
        bounds = zip(self.offsets, self.offsets[1:], self.shapes, strict=False)
        return [vector[start:end].view(shape) for start, end, shape in bounds]

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """(P,) -> the views by parameter."""
        return dict(zip(self.names, self.views(vector), strict=True))


def layout_of(model: nn.Module) -> Layout:
    """Lay out the trainable parameters of `model`. Errors: ModelError where there are none."""
    trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ModelError(
            "the model has no trainable parameter", "no section `lora`, or modules that the model has"
        )
    return Layout(tuple(name for name, _ in trained), tuple(shape for _, shape in trained))


# ---- safetensors files -------------------------------------------------------------------------------------

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes that convert to float32 without rounding -> bytes
EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}  # its bits: all are set in NaN and infinity
FINITE_WINDOW = 1 << 24  # bytes looked through at a time
FLOATS = "float32, float16 or bfloat16"
QUANTIZED = ("I8", "F8_E4M3", "F8_E5M2")  # codes, meaningless without their scales
UNQUANTIZED = "the model that it was made from; model.load_in_4bit=true holds that in 4 bits"  # a hint
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
SUMS = "sums"  # the word of a header with the fingerprint of each tensor
# A reader holds a header as objects, which take many times its bytes. The longest in use are of models with
# many small experts: 3 MB in 60 GB.
MAX_HEADER, HEADER_SHARE = 2 << 20, 1 << 14  # bytes, and bytes of the file for a further one
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

    def is_finite(self) -> bool:
        """Tell whether all numbers are finite; True of other dtypes than WIDTHS."""
        width = WIDTHS.get(self.dtype, 0)
        for at in range(0, len(self.data) if width else 0, FINITE_WINDOW):
            raw = np.frombuffer(bytes(self.data[at : at + FINITE_WINDOW]), f"<u{width}")
            if (raw & EXPONENT[self.dtype]).max(initial=0) == EXPONENT[self.dtype]:
                return False
        return True

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


def write_with_sums(path: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> None:
    """Write tensors like `write_safetensors`, with the fingerprint of each, and a hash of the words, in the
    header."""
    sums = json.dumps({name: sum_of(tensor) for name, tensor in tensors.items()})
    words = {**words, SUMS: sums}
    write_safetensors(path, tensors, {**words, CHECK: words_digest(words)})


def damaged_part(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Name what is not as `write_with_sums` wrote it: the header, by its words, or a tensor; "" where all
    is."""
    if words.get(CHECK) != words_digest(words):
        return "its header"
    sums = parse_json(words[SUMS])
    return next((name for name, one in tensors.items() if sums.get(name) != sum_of(one)), "")


def sum_of(tensor: Tensor) -> str:
    """Return the fingerprint of a tensor, hex."""
    return f"{fingerprint(tensor.reshape(-1)):016x}"


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
                    said = f"{path}: {key} is stored as {entry['dtype']}, expected {FLOATS}"
                    raise ModelError(said, UNQUANTIZED)
                data = FileSlice(file, header.start + first, last - first)
                tensors[key] = StoredTensor(entry["dtype"], tuple(entry["shape"]), data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{folder}: its weights cannot be read: {error}"
        raise ModelError(said, "download or save them again") from error
    return tensors


def check_disk_space(folder: Path, needed: int) -> None:
    """Raise OSError with ENOSPC where `needed` bytes do not fit beside the reserve."""
    free = shutil.disk_usage(folder).free
    if free < needed + DISK_RESERVE:
        text = f"a model of {needed / 1e9:.2f} GB does not fit, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, text, str(folder))


# ---- model folders -----------------------------------------------------------------------------------------

LONGEST_WORDS = 300  # characters of transformers' error texts, some of which list every model there is
LOADING = threading.RLock()  # serializes transformers' loading code (`quiet_transformers`)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a sibling of `folder` to write into; its files move to `folder` at the end, the weights last.

    After an error the sibling is removed and `folder` is unchanged.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # half a model is of no use, least of all on a full disk
        raise
    folder.mkdir(parents=True, exist_ok=True)
    for file in part.glob("*.safetensors"):  # written with the rights of a temporary file
        shutil.copymode(next(part.glob("*config.json")), file)
    for file in sorted(part.iterdir(), key=lambda file: (file.suffix == ".safetensors", file.name)):
        os.replace(file, folder / file.name)
    part.rmdir()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers: the library reports, the CLI shows.

    One thread at a time: while transformers loads a model it patches `tie_weights` and the initialization of
    its classes, for the whole process. Two threads that do so together leave them patched for good.
    """
    from transformers.utils import logging

    untyped: Any = logging
    with LOADING:
        bars, level = untyped.is_progress_bar_enabled(), untyped.get_verbosity()
        untyped.disable_progress_bar()
        untyped.set_verbosity_error()
        try:
            yield
        finally:
            untyped.set_verbosity(level)
            if bars:
                untyped.enable_progress_bar()


def check_model_folder(folder: Path, name: str | None = None) -> None:
    """Raise ModelError unless `folder` has a config and weights; `name`: what the message calls it."""
    name = name or str(folder)
    if not folder.is_dir():
        raise ModelError(f"no such model folder: {name}")
    check_config(folder, name)
    if any((folder / file).is_file() for file in (WEIGHTS_FILE, WEIGHTS_INDEX)):
        return
    if part := next(folder.glob("model-*.safetensors"), None):
        raise ModelError(f"{name}: {part.name} is one of several, without {WEIGHTS_INDEX} {COPY_AGAIN}")
    if next(folder.glob("pytorch_model*.bin"), None) is None:
        gguf = next(folder.glob("*.gguf"), None)
        hint = OF_GGUF if gguf else "save_pretrained writes them, or give the folder that has them"
        raise ModelError(f"{name}: no weights (model.safetensors or pytorch_model.bin) (hint: {hint})")


def check_config(folder: Path, name: str) -> None:
    """Raise ModelError unless config.json is a JSON object of a model that is whole; `name`: what the message
    calls the folder."""
    check_no_pointers(folder)
    adapter = (folder / "adapter_config.json").is_file()
    if not (folder / "config.json").is_file():
        hint = "a folder that save_pretrained wrote, of model and tokenizer, or a hub id"
        if inner := sorted(path.parent.name for path in folder.glob("*/config.json")):
            hint = f"is it {Path(name, inner[-1])}?"
        if next(folder.glob("*.gguf"), None) is not None:
            hint = OF_GGUF
        if adapter:
            hint = "it is an adapter: merge it into its base with peft, or name the base"
        raise ModelError(
            f"{name}: no config.json, so this is no model saved by save_pretrained (hint: {hint})"
        )
    if adapter:  # transformers would load both
        hint = "merge it with peft, or move adapter_config.json away to train the model without it"
        raise ModelError(f"{name}: an adapter lies beside the model (hint: {hint})")
    read_object(folder / "config.json", f"{name}/config.json")


def check_no_pointers(folder: Path) -> None:
    """Raise ModelError where a file is what a clone without git-lfs has in place of it."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(LFS_POINTER):
            raise ModelError(
                f"{path} is a git-lfs pointer, and not the file itself", "`git lfs pull` fetches it"
            )


def not_loadable(folder: Path, what: str, error: Exception) -> ModelError:
    """Make the error of a folder that transformers does not load as `what`, with transformers' own words.

    A tokenizer is loaded by way of the config: what is wrong there is said of the config.
    """
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        try:
            AutoConfig.from_pretrained(folder, **from_pretrained_options(folder, code=False))
        except ModelError:
            pass  # with code of its own, which is not run to explain an error
        except Exception as of_config:  # any kind: the class of the config checks its values
            what, error = "config.json", of_config
    words = textwrap.shorten(str(error), LONGEST_WORDS, placeholder=" ...")
    return ModelError(f"{folder}: transformers cannot load this {what}: {words}")


def weights_file_in(folder: Path) -> Path:
    """The weights of a model's or an adapter's folder."""
    return folder / (ADAPTER_FILE if (folder / ADAPTER_FILE).is_file() else WEIGHTS_FILE)


def write_model_files(folder: Path, config_files: Mapping[str, str], tokenizer: Path) -> None:
    """Turn a folder of weights into a model folder: write its configs, copy the files of a tokenizer."""
    for file in sorted(path for path in tokenizer.iterdir() if path.is_file()):
        shutil.copyfile(file, folder / file.name)
    for name, text in config_files.items():
        (folder / name).write_text(text, encoding="utf-8")


# ---- a model folder as one vector --------------------------------------------------------------------------

OF_GGUF = "GGUF is for inference: name the model that it was made from"
OF_ANOTHER = "(hint: config.json and weights of one model, as save_pretrained wrote them)"
CONTINUE = "learn to continue text (hint: a decoder, such as GPT-2, Llama or Qwen)"


@dataclass
class StoredVector:
    """The trained parameters of a model, and the buffers stored beside them. Must be closed."""

    layout: Layout
    names: tuple[str, ...]  # in the file; transformers may have renamed them since
    parts: tuple[StoredTensor, ...]  # in the order of the layout
    buffers: Mapping[str, StoredTensor]
    files: ExitStack = field(default_factory=ExitStack)
    on_disk: bool = True  # False: the model was loaded into memory
    config_files: Mapping[str, str] = field(default_factory=dict)  # name -> text, beside the weights
    file_name: str = WEIGHTS_FILE
    tied: Mapping[str, str] = field(default_factory=dict)  # further name of a tied weight -> its layout name
    strange: Sequence[str] = ()  # weights in the files that the model of the config has not

    def part(self, name: str) -> StoredTensor:
        """The parameter with this name in the model, tied names included. Errors: ModelError."""
        name = self.tied.get(name, name)
        if name not in self.layout.names:
            raise ModelError(f"the model has no parameter {name}")
        return self.parts[self.layout.names.index(name)]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copy elements start .. stop - 1: (stop - start,) float32."""
        out = np.empty(stop - start, np.float32)
        offsets = self.layout.offsets
        which = bisect_right(offsets, start) - 1
        done = start
        while done < stop:
            begins, ends = offsets[which], min(offsets[which + 1], stop)
            if done < ends:
                out[done - start : ends - start] = self.parts[which].floats(done - begins, ends - begins)
                done = ends
            which += 1
        return out

    def close(self) -> None:
        self.files.close()


def open_stored_vector(
    folder: Path, code: bool = False, given: Mapping[str, StoredTensor] | None = None
) -> StoredVector | None:
    """Open the weights of a model folder, safetensors or those `given`, in the order of the parameters.

    Returns None where they do not fit the model by name and dtype: it must be loaded (`vector_of_model`).
    Errors: ModelError, also for a weight of another shape than the config's, or without any.
    """
    check_model_folder(folder)
    model = meta_model(folder, code=code)
    layout = layout_of(model)
    with ExitStack() as files:
        tensors = open_tensors(folder, files) if given is None else dict(given)
        stored_names = _stored_names(model, list(tensors))
        tied = tied_names(model)
        found = {name: tensors.get(stored_names.get(name, "")) for name in layout.names}
        twice = {first for name, first in tied.items() if name in stored_names}  # it may not be a tied weight
        strange = sorted(stored_names[name] for name in stored_names.keys() - model.state_dict().keys())
        # of what transformers computes of others the names are not known here
        known = len(stored_names) == len(tensors) or not any(found.values())
        for (name, part), shape in zip(found.items(), layout.shapes, strict=True):
            if part is not None and part.shape != shape:
                raise ModelError(f"{folder}: {name} is {part.shape}, by its config.json {shape} {OF_ANOTHER}")
            if part is None and known and stored_names and name not in twice:
                have = f", and have {strange[0]} instead" if strange else ""
                raise ModelError(f"{folder}: the weights lack {name}{have} {OF_ANOTHER}")
        parts = tuple(part for part in found.values() if part and part.dtype in WIDTHS)
        if len(parts) < len(found) or twice:
            return None
        opened = files.pop_all()
    names = tuple(stored_names[name] for name in layout.names)
    buffers = {name: tensor for name, tensor in tensors.items() if name not in set(names)}
    texts = model_config_files(folder, code)
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    strange = [name for name in strange if not any(each.search(name) for each in ignored)]
    return StoredVector(layout, names, parts, buffers, opened, config_files=texts, tied=tied, strange=strange)


def check_finite(folder: Path, parts: Mapping[str, StoredTensor], hint: str) -> None:
    """Read all of these tensors of a folder. Raises ModelError where one has NaN or infinity."""
    if name := next((name for name, part in parts.items() if not part.is_finite()), None):
        raise ModelError(f"{folder}: {name} has a number that is NaN or infinite", hint)


def check_weights(
    folder: Path, code: bool = False, given: Mapping[str, StoredTensor] | None = None
) -> list[str]:
    """Read all weights of a model folder, or those `given`; returns a warning of those that its config has no
    place for.

    Errors: ModelError where one has NaN or infinity, or transformers refuses the generation config; also as
    `open_stored_vector`.
    """
    from transformers import GenerationConfig

    if (generation := folder / "generation_config.json").is_file():
        read_object(generation)
        try:
            with quiet_transformers():
                GenerationConfig.from_pretrained(folder)
        except (ValueError, TypeError, AttributeError) as error:  # of a value
            said = f"{generation}: transformers refuses it: {' '.join(str(error).split())[:LONGEST_WORDS]}"
            raise ModelError(said, "correct that value, or remove the file") from error
    strange: Sequence[str] = ()
    with ExitStack() as files:
        stored = open_stored_vector(folder, code, given)
        if stored is not None:
            files.callback(stored.close)
            parts, strange = dict(zip(stored.names, stored.parts, strict=True)), stored.strange
        else:  # a single number is a mask's
            tensors = open_tensors(folder, files) if given is None else given
            parts = {n: one for n, one in tensors.items() if prod(one.shape) > 1}
        check_finite(folder, parts, "download or convert the model again")
    some = f"{strange[0]} and {len(strange) - 1} more weights" if strange[1:] else "".join(strange)
    return [f"{folder}: by its config.json the model has no {some}: not trained"] if strange else []


def vector_of_model(model: PreTrainedModel, folder: Path, code: bool = False) -> StoredVector:
    """Wrap a model that was loaded from `folder` as a StoredVector in memory."""
    layout, tied = layout_of(model), tied_names(model)
    tensors = {name: stored_from_tensor(tensor) for name, tensor in model.state_dict().items()}
    buffers = {name: tensor for name, tensor in tensors.items() if name not in {*layout.names, *tied}}
    parts = tuple(tensors[name] for name in layout.names)
    texts = model_config_files(folder, code)
    return StoredVector(layout, layout.names, parts, buffers, on_disk=False, config_files=texts, tied=tied)


def model_config_files(folder: Path, code: bool = False) -> dict[str, str]:
    """Files that turn float32 weights into a model folder, name -> text: the configs in `folder`, and its
    code where that is trusted."""
    config = read_object(folder / "config.json")
    for name in ("torch_dtype", "_name_or_path", "quantization_config"):  # the older spelling; not of numbers
        config.pop(name, None)
    config["dtype"] = "float32"
    own = folder.glob(CODE_FILES) if code else ()
    texts = {file.name: file.read_text(encoding="utf-8") for file in own}
    texts["config.json"] = json.dumps(config, indent=2) + "\n"
    if (generation := folder / "generation_config.json").is_file():
        read_object(generation)
        texts[generation.name] = generation.read_text(encoding="utf-8")
    return texts


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters -> the name in the layout."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def meta_model(folder: Path, dtype: torch.dtype | None = None, code: bool = False) -> PreTrainedModel:
    """Build the model of the config in `folder` on the meta device: names and shapes without weights.

    `dtype`: of its parameters; None: the config's. Errors: ModelError.
    """
    with quiet_transformers(), torch.device("meta"):
        return model_of_config(folder, code, **({} if dtype is None else {"dtype": dtype}))


def model_of_config(folder: Path, code: bool = False, **chosen: Any) -> PreTrainedModel:
    """Build the model of the config in `folder`, with new weights. Errors: ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = from_pretrained_options(folder, code)
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        untyped: Any = AutoModelForCausalLM
        model: PreTrainedModel = untyped.from_config(config, trust_remote_code=code, **chosen)
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        if "Unrecognized configuration class" in str(error):
            if {"vision_config", "audio_config"} & config.to_dict().keys():
                said = f"{folder}: a {config.model_type} model is multimodal, which is not supported"
                raise ModelError(f"{said} (hint: a model of text alone)") from error
            raise ModelError(f"{folder}: a {config.model_type} model cannot {CONTINUE}") from error
        raise not_loadable(folder, "causal language model", error) from error
    return model


def _stored_names(model: PreTrainedModel, stored: Sequence[str]) -> dict[str, str]:
    """Name in the model -> name in the file, for the weights that transformers loads without computing."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        wanted: Any = model.state_dict()
        rules = get_model_conversion_mapping(model)
        renames = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        computed = [rule for rule in rules if isinstance(rule, WeightConverter)]
        found: dict[str, str] = {}
        for name in stored:
            new, converted = rename_source_key(name, renames, computed, model.base_model_prefix, wanted)
            if new not in wanted and name in wanted:
                new, converted = name, None
            if converted is None and found.setdefault(new, name) != name:
                return {}  # two stored tensors for one parameter
        return found
    except (ImportError, TypeError, AttributeError):  # this version of transformers lacks these functions
        return {name: name for name in stored}
