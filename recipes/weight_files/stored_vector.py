"""The weights of a model folder as one vector of P numbers, read window by window.

Where the names and shapes in the safetensors files are those of the model that transformers builds, no model
is ever loaded. Otherwise (`.bin` files, names that transformers translates) the caller loads it, and the
vector lies in memory.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from recipes.downloads import CODE_FILES, from_pretrained_options
from recipes.errors import ModelError
from recipes.foreign_json import read_object

from .model_folder import check_model_folder, not_loadable, quiet_transformers
from .parameter_layout import Layout, layout_of
from .safetensors_files import (
    COPIED_AT_ONCE,
    STORED_DTYPES,
    WEIGHTS_FILE,
    WIDTHS,
    StoredTensor,
    open_tensors,
    stored_from_tensor,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def differs_from(self, vector: torch.Tensor) -> str | None:
        """Name the first parameter that is not the one of `vector` (P,), rounded to its dtype; None: none."""
        for name, part, view in zip(self.names, self.parts, self.layout.views(vector), strict=True):
            flat, dtype = view.reshape(-1), STORED_DTYPES[part.dtype]
            for at in range(0, len(flat), COPIED_AT_ONCE):
                wanted = flat[at : at + COPIED_AT_ONCE].to(dtype).float().numpy()
                if part.floats(at, at + len(wanted)).tobytes() != wanted.tobytes():
                    return name
        return None

    def close(self) -> None:
        self.files.close()


def open_stored_vector(folder: Path, code: bool = False) -> StoredVector | None:
    """Open the safetensors weights of a model folder in the order of the model's parameters.

    Returns None where they do not fit the model by name and dtype: it must be loaded (`vector_of_model`).
    Errors: ModelError, also for a weight of another shape than the config's, or without any.
    """
    check_model_folder(folder)
    model = meta_model(folder, code=code)
    layout = layout_of(model)
    with ExitStack() as files:
        tensors = open_tensors(folder, files)
        stored_names = _stored_names(model, list(tensors))
        tied = tied_names(model)
        found = {name: tensors.get(stored_names.get(name, "")) for name in layout.names}
        twice = tied.keys() & stored_names.keys()  # it may not be a tied weight
        known = len(stored_names) == len(tensors) and stored_names.keys() <= model.state_dict().keys()
        for (name, part), shape in zip(found.items(), layout.shapes, strict=True):
            if part is not None and part.shape != shape:
                raise ModelError(f"{folder}: {name} is {part.shape}, by its config.json {shape} {OF_ANOTHER}")
            if part is None and known and tensors and not twice:
                raise ModelError(f"{folder}: the weights lack {name} {OF_ANOTHER}")
        parts = tuple(part for part in found.values() if part and part.dtype in WIDTHS)
        if len(parts) < len(found) or twice:
            return None
        opened = files.pop_all()
    names = tuple(stored_names[name] for name in layout.names)
    buffers = {name: tensor for name, tensor in tensors.items() if name not in set(names)}
    texts = model_config_files(folder, code)
    return StoredVector(layout, names, parts, buffers, opened, config_files=texts, tied=tied)


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
    config.pop("torch_dtype", None)  # the older spelling
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
    from transformers import AutoConfig, AutoModelForCausalLM

    options = from_pretrained_options(folder, code)
    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, **options)
            chosen: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
            untyped: Any = AutoModelForCausalLM
            model: PreTrainedModel = untyped.from_config(config, trust_remote_code=code, **chosen)
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        if "Unrecognized configuration class" in str(error):
            raise ModelError(f"{folder}: a {config.model_type} model cannot {CONTINUE}") from error
        raise not_loadable(folder, "causal language model", error) from error
    if not _is_causal(model):
        raise ModelError(f"{folder}: {type(model).__name__} is an encoder here, which cannot {CONTINUE}")
    return model


def _is_causal(model: PreTrainedModel) -> bool:
    """False for an encoder such as BERT that is loaded to continue text, though its tokens see later ones."""
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    return causal or getattr(model.config, "is_decoder", None) is not False


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
