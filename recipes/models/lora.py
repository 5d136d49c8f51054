"""LoRA (Hu et al., 2021): PEFT adapters beside a frozen base; only they are trained and exchanged.

    y = W x + s B A x      A: (r, in), drawn from the seed      B: (out, r), 0      s = alpha / r (or sqrt(r))

x_0 must be bit-identical at every peer, whatever its device and version of torch: A is drawn from a raw PCG64
stream, with one rounding an element. PEFT's own initialization has the same variance.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from torch import Tensor, nn

from recipes.config import Lora
from recipes.errors import ModelError
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
        use_rslora=lora.use_rslora,
    )
    missing = [name for name in lora.lora_modules_to_save if not _has(model, name)]
    if missing:
        raise ModelError(f"lora_modules_to_save: the model has no module {', '.join(missing)}")
    try:
        with quiet_transformers(), warnings.catch_warnings(), next(model.parameters()).device:
            warnings.simplefilter("ignore")  # peft corrects what it warns of: Conv1D, tied weights
            made: Any = get_peft_model(model, config)
    except ValueError as error:  # names the modules that peft did not find
        raise ModelError(f"lora_target_modules: {error}") from error
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
    if "lora_A" in name:
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


def _has(model: nn.Module, name: str) -> bool:
    return any(module == name or module.endswith("." + name) for module, _ in model.named_modules())


def adapter_scale(lora: Lora) -> float:
    return lora.lora_alpha / (lora.lora_r**0.5 if lora.use_rslora else lora.lora_r)


def adapter_delta(A: Tensor, B: Tensor, scale: float, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """Compute s B A for a weight of `shape`, float32. `transposed`: the weight is (in, out)."""
    found = scale * (B @ A)  # (out, in)
    return (found.T if transposed else found).reshape(shape)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def adapter_base(folder: Path) -> tuple[str, str | None]:
    """Read which base an adapter is for: folder or hub id, and its revision. Errors: ModelError."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return str(config["base_model_name_or_path"]), config.get("revision")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder / CONFIG} names no base model: {error}") from error
