"""Objectives, which a run minimizes: a mean over terms, whose sum and number add up over micro-batches and
peers.

    f(x) = sum of losses / terms        terms: trained tokens, or samples

The usual one is the cross-entropy of the trained tokens; an extension may have another.

Logits are B x T x V numbers: 1.2 GB in float32 for 2,048 tokens of a vocabulary of 150,000, and the loss and
its gradient need as much again. Here the loss is computed for one slice of tokens at a time, and once more in
the backward pass (activation checkpointing), so that the logits of one slice exist at any time. The head is
all that the class of the model computes after its decoder: the linear layer, its bias, soft capping, scaling.
To compute it for a slice, the class's own forward is called with a decoder that returns the slice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from math import log
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recipes.config import Recipe
from recipes.data import Sample, batches, collate

Bounds = tuple[float, float]  # least and greatest mean of a term


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a micro-batch, with its graph."""

    sum: Tensor  # () over the terms, in nats
    terms: int
    figures: Tensor | None = None  # (n,) sums of figures beside the loss


@dataclass(frozen=True)
class Measured:
    """The losses of samples, and further figures of the objective, as sums."""

    loss_sum: float = 0.0
    terms: int = 0
    figures: tuple[float, ...] = ()  # as many as the objective bounds
    notes: Mapping[str, str] = field(default_factory=dict)  # of extensions on each sample, in hex

    @property
    def mean(self) -> float:
        """Mean loss of a term; 0 where there is none."""
        return self.loss_sum / max(self.terms, 1)

    def __add__(self, other: Measured) -> Measured:
        figures = (a + b for a, b in zip_longest(self.figures, other.figures, fillvalue=0.0))
        sums = self.loss_sum + other.loss_sum, self.terms + other.terms, tuple(figures)
        names = self.notes.keys() | other.notes.keys()
        return Measured(*sums, {name: self.notes.get(name, "") + other.notes.get(name, "") for name in names})


class Objective(Protocol):
    """A run minimizes it."""

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        """Return what the loss of a term lies between, of any model that still is one, then each of its
        further figures. A hub drops what a peer reports beyond. `vocabulary`: tokens that the model knows; 0:
        not known."""

    def terms(self, samples: Sequence[Sample]) -> int:
        """Count the terms of the mean."""

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        """Compute the loss of a micro-batch."""

    def longest(self, length: int) -> Sample:
        """Make the largest sample of a recipe whose sequences have up to `length` tokens."""

    def uncounted(self, like: Sample) -> Sample:
        """Make a small sample that adds nothing to loss and terms."""


@torch.no_grad()
def evaluate(objective: Objective, model: nn.Module, samples: Sequence[Sample], size: int) -> Measured:
    """Measure samples in micro-batches of `size`, with the model in evaluation mode."""
    training, device = model.training, next(model.parameters()).device
    model.eval()
    found = Measured()
    try:
        for part in batches(samples, size):
            found += measured(objective.loss(model, part, device))
    finally:
        model.train(training)
    return found


def measured(loss: BatchLoss) -> Measured:
    """Read a loss as numbers."""
    figures = () if loss.figures is None else tuple(loss.figures.tolist())
    return Measured(float(loss.sum.detach()), loss.terms, figures)


# ---- the cross-entropy -------------------------------------------------------------------------------------

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
    vocabulary = int(causal.get_output_embeddings().weight.shape[0]) if can_slice(causal) else 0
    if 4 * targets.numel() * vocabulary > slice_bytes:
        rows = max(slice_bytes // (4 * vocabulary), 1)
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


# ---- the usual objective -----------------------------------------------------------------------------------

CHANCE = 100.0  # times the loss of a guess: more than any model has that learns
LARGEST = 2**24  # tokens of a vocabulary that is not known


class NextTokens:
    """The mean loss of a trained token."""

    def bounds(self, vocabulary: int) -> tuple[Bounds, ...]:
        return ((0.0, CHANCE * log(max(2, vocabulary or LARGEST))),)

    def terms(self, samples: Sequence[Sample]) -> int:
        return sum(sample.count for sample in samples)

    def loss(self, model: nn.Module, part: Sequence[Sample], device: torch.device) -> BatchLoss:
        batch = {name: tensor.to(device) for name, tensor in collate(part).items()}
        return BatchLoss(*loss_sum(model, batch))

    def longest(self, length: int) -> Sample:
        return Sample(np.zeros(length, np.int32), np.arange(length) > 0)

    def uncounted(self, like: Sample) -> Sample:
        return Sample(like.tokens[:2], np.zeros(2, bool))


def objective_of(recipe: Recipe) -> Objective:
    """Return what this recipe minimizes."""
    return recipe.objective.objective() or NextTokens()
