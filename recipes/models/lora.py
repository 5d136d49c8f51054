"""LoRA (Hu et al., 2021): PEFT adapters beside a frozen base; only they are trained and exchanged.

    y = W x + s B A x      A: (r, in), drawn from the seed      B: (out, r), 0      s = alpha / r
    y = m V x / |V|        DoRA (Liu et al., 2024): V = W + s B A, m: (out,), at first |W|; |.| of each row

x_0 must be bit-identical at every peer, whatever its device and version of torch: A is drawn from a raw PCG64
stream, with one rounding an element. PEFT's own initialization has the same variance.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from recipes.config import Lora
from recipes.errors import ModelError
from recipes.foreign_json import read_object
from recipes.weight_files import quiet_transformers

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
STEPS = 1 << 23  # distinct values of an element of A: odd multiples of bound / STEPS


def add_adapters(model: PreTrainedModel, lora: Lora) -> PeftModel:
    """Freeze `model` and add float32 adapters, not initialized yet.

    Errors: ModelError where the model has no such modules.
    """
    from peft import LoraConfig, get_peft_model

    listed = lora.lora_target_modules
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=listed if isinstance(listed, str) else list(listed),
        modules_to_save=list(lora.lora_modules_to_save) or None,
        use_dora=lora.use_dora,
        target_parameters=list(lora.target_parameters) or None,
    )
    _check_names("lora_modules_to_save", lora.lora_modules_to_save, model.named_modules(), "module")
    _check_names("target_parameters", lora.target_parameters, model.named_parameters(), "parameter")
    try:
        with quiet_transformers(), warnings.catch_warnings(), next(model.parameters()).device:
            warnings.simplefilter("ignore")  # peft corrects what it warns of: Conv1D, tied weights
            made: Any = get_peft_model(model, config)
    except ValueError as error:  # names the modules that peft did not find
        hint = " (hint: lora_dropout=0)" if "lora_dropout" in str(error) else ""
        raise ModelError(f"lora_target_modules: {error}{hint}") from error
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # modules_to_save come in the base's dtype
    peft: PeftModel = made
    return peft


def stored_names(model: PeftModel) -> dict[str, str]:
    """Name of a trained parameter -> its name in an adapter's file."""
    from peft import get_peft_model_state_dict

    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    stored: Mapping[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), save_embedding_layers=False
    )
    return {names[id(tensor)]: name for name, tensor in stored.items() if id(tensor) in names}


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray | None:
    """Draw x_0 of the adapter parameter `name`, float32; None: it is a copy of the base's."""
    if "lora_B" in name or "lora_embedding_A" in name:
        return np.zeros(shape, np.float32)
    if "lora_A" in name:  # of the adapter of experts A has r rows for each
        return np.asarray(draw_uniform(name, shape, seed) * np.float32(1 / sqrt(shape[1])))
    if "lora_embedding_B" in name:
        return np.asarray(draw_uniform(name, shape, seed) * np.float32(sqrt(3)))  # variance 1
    return None


def draw_uniform(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw uniformly from (-1, 1): odd multiples of 1 / STEPS, exact in float32."""
    stream = np.random.PCG64(np.random.SeedSequence([seed, crc32(name.encode())]))
    count = int(np.prod(shape))
    whole = (stream.random_raw(count) >> np.uint64(64 - 23)).astype(np.int64)
    return np.asarray((2 * whole + 1 - STEPS).astype(np.float32) / np.float32(STEPS)).reshape(shape)


def adapter_config_text(model: PeftModel, base: str, revision: str | None) -> str:
    """Render adapter_config.json. `base`: hub id or folder, by which peft finds the base."""
    config = model.peft_config["default"]
    values = config.to_dict() | {
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
    }
    return json.dumps(values, indent=2, sort_keys=True, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Sort sets: two snapshots of one x' must be the same bytes."""
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))


def _check_names(key: str, names: Sequence[str], known: Iterable[tuple[str, object]], kind: str) -> None:
    """Check that the model has what a key of `lora:` names, whole or from a dot on. Errors: ModelError."""
    there = [name for name, _ in known]
    missing = [name for name in names if not any(f".{one}".endswith(f".{name}") for one in there)]
    if missing:
        near = get_close_matches(missing[0], sorted({one.rpartition(".")[2] for one in there}), n=1)
        meant = f" (did you mean `{near[0]}`?)" if near else ""
        raise ModelError(f"{key}: the model has no {kind} {', '.join(missing)}{meant}")


def adapter_scale(lora: Lora) -> float:
    return lora.lora_alpha / lora.lora_r


@dataclass
class Adapter:
    """The trained factors of one weight's adapter, float32."""

    transposed: bool  # the weight is (in, out), or (experts, in, out)
    factors: dict[str, Tensor] = field(default_factory=dict)  # A: (r, in), B: (out, r), of DoRA m: (out,)

    def merged(self, weight: Tensor, scale: float) -> Tensor:
        """Compute W + s B A, or what DoRA makes of it, for a weight (out, in) or (experts, out, in)."""
        A, B, m = (self.factors.get(name) for name in "ABm")
        assert A is not None
        assert B is not None
        if weight.dim() == 3:  # A: (experts r, in), B: (out, r experts)
            experts = weight.shape[0]
            A, B = A.reshape(experts, -1, A.shape[-1]), B.reshape(len(B), -1, experts).permute(2, 0, 1)
        found = (weight.mT if self.transposed else weight) + scale * (B @ A)
        if m is not None:
            found *= (m.reshape(-1) / torch.linalg.norm(found, dim=1))[:, None]
        return found.mT if self.transposed else found


def split_adapters(model: Any, values: Mapping[str, Tensor]) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Map weights of the base to their adapters, and weights trained in full to their values.

    Args:
        model: with adapters, on any device.
        values: trained parameter of `model` -> its values.
    """
    modules, adapters, full = dict(model.named_modules()), dict[str, Adapter](), dict[str, Tensor]()
    for name, part in values.items():
        module, lora, rest = name.partition(".lora_")
        if not lora:
            full[base_parameter_name(name)] = part
            continue
        of = adapters.setdefault(
            adapted_weight(modules[module], module), Adapter(is_transposed(modules[module]))
        )
        of.factors["m" if rest.startswith("magnitude") else rest.removeprefix("embedding_")[0]] = part
    return adapters, full


def adapted_weight(layer: Any, name: str) -> str:
    """Name, in the base, of the weight that peft's layer `name` adapts. Adapters of several parameters of one
    module are layers around each other."""
    outer = base_parameter_name(name)
    while outer.endswith(".base_layer"):
        outer = outer.removesuffix(".base_layer")
    return f"{outer}.{getattr(layer, 'parameter_name', 'weight')}"


def is_transposed(layer: Any) -> bool:
    """True where the weight that peft's layer adapts is (in, out) instead of (out, in)."""
    base = layer.get_base_layer()
    if hasattr(layer, "parameter_name"):  # of experts
        return bool(getattr(base, "is_transposed", False))
    return type(base).__name__ in ("Conv1D", "Embedding")


def row_norms(weight: np.ndarray) -> np.ndarray:
    """Compute the norms of the rows of a weight (out, in): (out,) float32.

    Sums are of halves, element by element in float64, so that every machine gets the same bits.
    """
    squares = weight.astype(np.float64) ** 2
    while squares.shape[1] > 1:
        half = -(-squares.shape[1] // 2)
        squares = np.pad(squares, ((0, 0), (0, 2 * half - squares.shape[1])))
        squares = squares[:, :half] + squares[:, half:]
    return np.sqrt(squares[:, 0]).astype(np.float32)


def base_parameter_name(name: str) -> str:
    """Strip peft's wrappers: base_model.model.lm_head.modules_to_save.default.weight -> lm_head.weight"""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def adapter_base(folder: Path) -> tuple[str, str | None]:
    """Read which base an adapter is for: folder or hub id, and its revision. Errors: ModelError."""
    config = read_object(folder / CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not isinstance(revision, str | None):
        raise ModelError(f"{folder / CONFIG} names no base model", "base_model_name_or_path in that file")
    return name, revision
