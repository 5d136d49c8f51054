"""Hugging Face causal language models: load one, and find out which tokens see which.

A model comes from the folder of a base and leaves as such a folder, with the trained vector in it. Weights
are tensors: safetensors, or `.bin` through `torch.load(weights_only=True)`, as transformers does. Only a
folder of this machine's user has `.bin` alone: what comes from a hub has no such name, and an index no
other files.

A model that does not isolate the documents of a packed sample would leak attention between them, and only a
slightly better loss would show it: `visible_in` tries it.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from recipes.config import Model
from recipes.downloads import from_pretrained_options
from recipes.errors import MissingPackage, ModelError
from recipes.foreign_json import read_object
from recipes.hardware import half_precision
from recipes.objectives import causal_model, logits_of
from recipes.weight_files import (
    StoredVector,
    check_model_folder,
    not_loadable,
    open_stored_vector,
    open_tensors,
    quiet_transformers,
    vector_of_model,
)

from .base_model import WEIGHTS, check_only_tensors


def quantization(model: Model, compute_dtype: torch.dtype) -> Any:
    """Build transformers' BitsAndBytesConfig of a frozen base in 8 or 4 bits. Errors: MissingPackage."""
    if find_spec("bitsandbytes") is None:
        raise MissingPackage(
            "a base in 8 or 4 bits needs bitsandbytes, which is not installed", "bitsandbytes"
        )
    untyped: Any = BitsAndBytesConfig
    return untyped(
        load_in_4bit=model.load_in_4bit,
        load_in_8bit=not model.load_in_4bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=model.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def load_model(
    folder: Path,
    attn_implementation: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Literal["auto"] = torch.float32,  # of the weights; auto: as stored
    quantized: Model | None = None,  # as this section of a recipe says
    code: bool = False,  # run the folder's own code
) -> PreTrainedModel:
    """Load the causal LM in `folder`, in evaluation mode. Errors: ModelError."""
    check_model_folder(Path(folder))
    with ExitStack() as files:
        open_tensors(Path(folder), files)  # refuses codes of quantized weights, which would pass for numbers
    chosen: dict[str, Any] = dict(from_pretrained_options(Path(folder), code))
    if "quantization_config" in read_object(Path(folder) / "config.json"):
        chosen["config"] = AutoConfig.from_pretrained(folder, **chosen)
        del chosen["config"].quantization_config  # of an earlier form of weights that are numbers here
    if any(next(Path(folder).glob(pattern), None) for pattern in WEIGHTS):
        chosen["use_safetensors"] = True  # and no pickle that lies beside them
    if attn_implementation != "auto":
        chosen["attn_implementation"] = attn_implementation
    if quantized is not None:
        compute_dtype = half_precision(torch.device(device)).dtype if dtype == "auto" else dtype
        chosen |= {"quantization_config": quantization(quantized, compute_dtype), "device_map": {"": device}}
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **chosen
            )
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        check_only_tensors(folder, error)
        raise not_loadable(folder, "causal language model", error) from error
    model, info = loaded
    if info["missing_keys"] or info["mismatched_keys"]:
        # transformers would draw them at random, and each peer would have another model
        missing = sorted(str(key) for key in [*info["missing_keys"], *info["mismatched_keys"]])
        said = f"{folder}: the weights lack {', '.join(missing[:3])} ({len(missing)} in all)"
        raise ModelError(said, "download or save them again")
    placed: PreTrainedModel = (model if quantized else model.to(device)).eval()
    return placed


def open_vector(folder: Path, code: bool = False) -> StoredVector:
    """Open the weights in a model folder as one vector: on disk where they can be read in place, else loaded
    into memory. Errors: ModelError."""
    return open_stored_vector(folder, code) or vector_of_model(load_model(folder, code=code), folder, code)


# ---- which tokens see which --------------------------------------------------------------------------------

TOLERANCE = 0.01  # of another token's influence beside an own one's: quantized weights round a little
DOCUMENTS = torch.arange(3).repeat(2)  # positions of two documents of three tokens
TOKENS = [[1, 2, 3, 4, 5, 6], [7, 0, 2, 4, 5, 6], [1, 2, 3, 0, 5, 6], [1, 2, 3, 4, 5, 0]]


@dataclass(frozen=True)
class Visible:
    """Which tokens a model's tokens see, as found by trying it."""

    documents: bool  # those of another document in their sample
    later: bool  # those that follow
    name: str = ""  # class of the model

    def check_isolation(self) -> None:
        """Raise ModelError where the last document of a sample depends on the one before."""
        if self.documents:
            raise ModelError(
                f"{self.name} of this version of transformers lets packed documents attend to each other "
                "(hint: data.packing_strategy=wrapped, if that is intended, or data.packing=false)"
            )


@torch.no_grad()
def visible_in(model: nn.Module) -> Visible:
    """Compare the logits of two documents with those where one token or document is another."""
    causal, training = causal_model(model), model.training
    there, rows = next(model.parameters()).device, len(TOKENS)
    batch = {"input_ids": torch.tensor(TOKENS), "position_ids": DOCUMENTS.expand(rows, -1)}
    if not {"position_ids", "kwargs"} & inspect.signature(causal.forward).parameters.keys():
        batch.pop("position_ids")
    model.eval()
    try:
        first, document, own, last = logits_of(model, {k: v.to(there) for k, v in batch.items()}).float()
    finally:
        model.train(training)
    ends = [float((one - first)[-1].abs().max()) for one in (document, own, last)]
    before = float((last - first)[:-1].abs().max())
    return Visible(ends[0] > TOLERANCE * ends[1], before > TOLERANCE * ends[2], type(model).__name__)


def check_packing_isolation(model: nn.Module) -> None:
    """Raise ModelError where the last document of a sample depends on the one before."""
    visible_in(model).check_isolation()
