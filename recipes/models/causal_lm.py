"""Hugging Face causal language models: load one, and compute its loss without holding the logits of all
tokens.

A model comes from the folder of a base and leaves as such a folder, with the trained vector in it. Weights
are tensors: safetensors, or `.bin` through `torch.load(weights_only=True)`, as transformers does. Only a
folder of this machine's user has `.bin` alone: what comes from a hub has no such name, and an index no
other files.

Logits are B x T x V numbers: 1.2 GB in float32 for 2,048 tokens of a vocabulary of 150,000, and the loss and
its gradient need as much again. Here the loss is computed for one slice of tokens at a time, and once more in
the backward pass (activation checkpointing), so that the logits of one slice exist at any time. The head is
all that the class of the model computes after its decoder: the linear layer, its bias, soft capping, scaling.
To compute it for a slice, the class's own forward is called with a decoder that returns the slice.

A model that does not isolate the documents of a packed sample would leak attention between them, and only a
slightly better loss would show it: `visible_in` tries it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from recipes.config import Model
from recipes.downloads import from_pretrained_options
from recipes.errors import MissingPackage, ModelError
from recipes.foreign_json import read_object
from recipes.hardware import half_precision
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


# ---- the loss ----------------------------------------------------------------------------------------------

IGNORED = -100  # the target of a token that is not trained, as in torch
SLICE_BYTES = 128 << 20  # of a slice's logits in float32


def loss_sum(
    model: nn.Module, batch: Mapping[str, Tensor], slice_bytes: int = SLICE_BYTES
) -> tuple[Tensor, int]:
    """Sum the token losses in nats, and count them: labels other than -100 after the shift by one.

    A sum, since parts of a batch that are computed separately (micro-batches, peers) must add up to the
    whole. More logits than `slice_bytes` are computed slice by slice.
    """
    inputs, targets = decoder_inputs(model, batch), next_tokens(batch["labels"])
    causal = causal_model(model)
    if model.training and uses_liger(causal):  # liger fuses nothing in evaluation
        fused = {"labels": targets, "shift_labels": targets, "num_items_in_batch": 1}  # 1: a sum, not a mean
        loss: Tensor = model(**inputs, **fused, use_cache=False).loss
    else:
        loss = _losses(model, inputs, targets, slice_bytes, "sum").sum()
    return loss, int((targets != IGNORED).sum())


def token_losses(
    model: nn.Module, batch: Mapping[str, Tensor], slice_bytes: int = SLICE_BYTES
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each token in nats, 0 where none is trained, and which are: (B, T) float and bool.

    Position t is that of the token which predicts t + 1. Slices as in `loss_sum`.
    """
    inputs, targets = decoder_inputs(model, batch), next_tokens(batch["labels"])
    losses = _losses(model, inputs, targets, slice_bytes, "none")
    return losses.reshape(targets.shape), targets != IGNORED


def _losses(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    targets: Tensor,
    slice_bytes: int,
    reduction: Literal["sum", "none"],
) -> Tensor:
    """Compute the losses at `targets`: one for each token, or summed for each slice."""
    causal = causal_model(model)
    if can_slice(causal) and 4 * targets.numel() * vocabulary_size(causal) > slice_bytes:
        rows = max(slice_bytes // (4 * vocabulary_size(causal)), 1)
        with loss_as_output(causal, targets, rows, reduction):
            losses: Tensor = model(**inputs, use_cache=False)
            return losses
    return cross_entropy(model(**inputs, use_cache=False).logits, targets, reduction)


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Compute the logits (B, T, V) of a batch of `collate`, with or without labels."""
    logits: Tensor = model(**decoder_inputs(model, batch), use_cache=False).logits
    return logits.reshape(*batch["input_ids"].shape, -1)


def decoder_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch without its labels. Callers add `use_cache=False`: with a cache, transformers drops the
    isolation of packed documents."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    if "position_ids" in inputs and attention.startswith("flash"):  # it isolates documents in one row only
        inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
    return inputs


def next_tokens(labels: Tensor) -> Tensor:
    """Shift labels (B, T) by one: position t has the label of t + 1, and the last one is not trained."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: Literal["sum", "none"] = "sum") -> Tensor:
    """Compute the losses of logits (..., V) at `targets` (...), in float32: their sum, or each, (N,)."""
    scores = logits.reshape(-1, logits.shape[-1]).float()
    wanted = targets.reshape(-1)
    return nn.functional.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction=reduction)


def causal_model(model: Any) -> Any:
    """Unwrap peft's adapters: the model of transformers, with its adapters in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def vocabulary_size(causal: Any) -> int:
    return int(causal.get_output_embeddings().weight.shape[0])


def uses_liger(causal: Any) -> bool:
    """True where liger-kernel has replaced the forward by one that computes a fused loss."""
    return str(inspect.unwrap(causal.forward).__module__).startswith("liger_kernel")


def can_slice(causal: Any) -> bool:
    """True where the class has a decoder apart from its head, and can leave logits out."""
    apart = hasattr(causal, "get_decoder") and causal.get_decoder() is not causal
    return apart and "logits_to_keep" in inspect.signature(causal.forward).parameters


@contextmanager
def loss_as_output(
    causal: Any, targets: Tensor, rows: int, reduction: Literal["sum", "none"]
) -> Iterator[None]:
    """Make `causal` return the losses at `targets` (B, T) instead of logits, `rows` tokens at a time: one for
    each token, or one sum for each slice.

    The model is called as always, from its outermost wrapper, so that hooks (FSDP's, peft's) run.
    """
    whole, decoder = causal.forward, causal.get_decoder()

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        seen: list[Any] = []
        hook = decoder.register_forward_hook(lambda module, given, output: seen.append(output))
        try:
            whole(*args, **kwargs, logits_to_keep=1)
        finally:
            hook.remove()
        [output] = seen

        def head(part: Tensor, wanted: Tensor) -> Tensor:
            with replaced_forward(
                decoder, lambda *args, **kwargs: type(output)(last_hidden_state=part[None])
            ):
                return cross_entropy(whole(*args, **kwargs).logits, wanted, reduction)

        hidden: Any = output.last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])  # (B T, H)
        slices = zip(torch.split(hidden, rows), torch.split(targets.reshape(-1), rows), strict=True)
        losses = [checkpoint(head, part, wanted, use_reentrant=False) for part, wanted in slices]
        return torch.cat([loss.reshape(-1) for loss in losses])

    with replaced_forward(causal, forward):
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward of one module, whether its own is the class's or has been replaced before."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


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
