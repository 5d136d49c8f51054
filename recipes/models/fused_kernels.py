"""liger-kernel's fused kernels: used on CUDA where they compute what the model computes.

With `training.use_liger_kernel: auto` a layer of the model's class, with random weights, is tried with them
and without: the loss of a micro-batch, and its loss after a step along the gradient. So a start pays some
micro-batches of a small model, and compiles the kernels that training needs anyway.

    float32     the losses agree to 1e-5
    bfloat16    they are no further apart than those of plain runs: at once, row by row, in float32
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from recipes.config import Recipe
from recipes.errors import MissingPackage
from recipes.objectives import loss_sum

AGREE = 1e-5  # of a loss in float32
LENGTH, STEP = 64, 0.01  # tokens of a row; of the step along the gradient
SMALL = {"num_hidden_layers": 1, "vocab_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 1024}


def with_liger_kernels(model: PreTrainedModel, recipe: Recipe, device: str | torch.device) -> PreTrainedModel:
    """Patch in the fused kernels where the recipe wants them, on CUDA. Errors: MissingPackage."""
    wanted = recipe.training.use_liger_kernel
    if not wanted or torch.device(device).type != "cuda":
        return model
    if wanted == "auto":
        small = small_config(model.config) if find_spec("liger_kernel") else ""
        kind: Any = type(model)
        if not small or not same_losses(kind, small, str(device), apply):
            return model
    try:
        apply(model)
    except ImportError as error:
        raise MissingPackage(
            "training.use_liger_kernel: liger-kernel is not installed",
            "liger-kernel",
            hints=("or training.use_liger_kernel=false",),
        ) from error
    return model


def apply(model: PreTrainedModel) -> None:
    """Patch in all kernels that liger-kernel has for a model; none for a class that it does not know."""
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, None)  # type: ignore[no-untyped-call]


def small_config(config: Any) -> str:
    """Return the config of a model of one layer that is as wide, without dropout, as JSON; "": it has other
    names for its sizes."""
    shape: dict[str, Any]
    shape = {name: 0.0 if "drop" in name else value for name, value in config.to_dict().items()}
    if not isinstance(shape.get("num_hidden_layers"), int):
        return ""
    shape |= {
        name: min(most, shape[name]) for name, most in SMALL.items() if isinstance(shape.get(name), int)
    }
    shape |= {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    if shape.get("layer_types"):
        shape["layer_types"] = shape["layer_types"][:1]
    return json.dumps(shape, sort_keys=True, default=str)


@cache
def same_losses(
    kind: Any,  # class of a PreTrainedModel
    config: str,  # as `small_config` writes it
    device: str,
    patch: Callable[[Any], object],
) -> bool:
    """Tell whether a model has the same losses with a patch as without, to which its module is restored. It
    is tried once in a process."""
    module = vars(sys.modules[kind.__module__])  # liger-kernel replaces functions and classes in it
    before = dict(module)
    try:
        shape = kind.config_class.from_dict(json.loads(config))
        with torch.random.fork_rng(devices=[]):  # all is drawn on the host
            torch.manual_seed(0)
            base, batch = spread_out(kind(shape).train()), tokens(int(shape.vocab_size))
        batch = {name: part.to(device) for name, part in batch.items()}
        rows = [
            {name: part[row : row + 1] for name, part in batch.items()} for row in range(len(batch["labels"]))
        ]

        def run(dtype: torch.dtype, parts: Sequence[Mapping[str, Tensor]], patched: bool) -> Tensor:
            model = copy.deepcopy(base).to(device, dtype)
            if patched:
                patch(model)
            return losses(model, parts)

        exact, plain = run(torch.float32, [batch], False), run(torch.bfloat16, [batch], False)
        spread = max(
            float((plain - other).abs().max()) for other in (exact, run(torch.bfloat16, rows, False))
        )
        fused, rounded = run(torch.float32, [batch], True), run(torch.bfloat16, [batch], True)
        near = (fused - exact).abs() <= AGREE * exact
        return bool(near.all()) and float((rounded - plain).abs().max()) <= spread
    except Exception:  # another package's kernels, compiled here: whatever they raise, the model does without
        return False
    finally:
        module.update(before)


@torch.no_grad()
def spread_out(model: nn.Module) -> nn.Module:
    """Draw matrices that keep the size of what they multiply: usual first weights leave attention so even
    that no loss shows an error in it."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def losses(model: nn.Module, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Compute the mean loss of a micro-batch in parts, and again after a step along its gradient: (2,)."""
    found = []
    for _ in range(2):
        sums, counts = zip(*(loss_sum(model, part) for part in parts), strict=True)
        mean = torch.stack([one.float() for one in sums]).sum() / sum(counts)
        mean.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=STEP)
                    parameter.grad = None
        found.append(mean.detach())
    return torch.stack(found)


def tokens(vocabulary: int) -> dict[str, Tensor]:
    """Draw a micro-batch: a row of one document, and a row of two."""
    drawn, places = torch.randint(0, vocabulary, (2, LENGTH)), torch.arange(LENGTH)
    return {
        "input_ids": drawn,
        "position_ids": torch.stack([places, places % (LENGTH // 2)]),
        "labels": drawn,
    }
