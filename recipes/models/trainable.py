"""What of a model a recipe trains: all of it, or adapters beside it. Either way x is a vector of P numbers.

                    trained          x_0                       a snapshot's folder
    full            every parameter  the base's weights        config.json, model.safetensors
    `lora:`         the adapters     drawn from the seed       adapter_config.json, adapter_model.safetensors

A vector is had from files and a model without weights (torch's meta device), or from the model itself.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from recipes.config import Recipe, Training
from recipes.errors import ModelError
from recipes.weight_files import (
    ADAPTER_FILE,
    StoredTensor,
    StoredVector,
    layout_of,
    meta_model,
    open_tensors,
    open_vector,
    quiet_transformers,
    stored_from_tensor,
)

from .base_model import cached_commit
from .causal_lm import Quantized, load_model
from .lora import CONFIG, adapter_config_text, add_adapters, initial_value, stored_names

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}


def trained_dtype(recipe: Recipe) -> torch.dtype:
    """Of the parameters that are trained, as the model computes with them."""
    named = recipe.lora is None and recipe.model.dtype != "auto"
    return DTYPES[recipe.model.dtype] if named else torch.float32


def prepare_for_training(model: PreTrainedModel, recipe: Recipe) -> nn.Module:
    """A model as it is trained: with its adapters, its base frozen, its activations kept or not.

    Errors: ModelError where its class cannot do that.
    """
    training = recipe.training
    if training.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        asked = dict(training.activation_checkpointing_kwargs)
        if model.device.type in ("cpu", "meta"):
            asked.pop("offload", None)  # they are in the host's memory
        try:
            with quiet_transformers():
                enable(**asked)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{error} (hint: training.activation_checkpointing=false)") from error
    return model if recipe.lora is None else add_adapters(model, recipe.lora)


def with_liger_kernels(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """With the fused kernels of liger-kernel where the recipe wants them, on CUDA. Errors: ModelError."""
    if recipe.training.use_liger_kernel and model.device.type == "cuda":
        try:
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(model, None)
        except ImportError as error:
            hint = "(hint: pip install 'cocktail-sgd[liger]', or training.use_liger_kernel=false)"
            raise ModelError(f"training.use_liger_kernel: liger-kernel is not here {hint}") from error
    return model


def meta_trained_model(recipe: Recipe, base: Path) -> nn.Module:
    """The model as it is trained, names, shapes and kinds only, on the meta device. Errors: ModelError."""
    as_stored = recipe.lora is not None and recipe.model.dtype == "auto"
    kind = None if as_stored else DTYPES.get(recipe.model.dtype, torch.float32)
    return prepare_for_training(meta_model(base, kind, recipe.model.trust_remote_code), recipe)


def check_trainable(recipe: Recipe, base: Path) -> None:
    """Whether the class of this base can do what the recipe asks of it. Errors: ModelError."""
    model = meta_model(base, code=recipe.model.trust_remote_code)
    wanted = recipe.model.attn_implementation
    flag = ATTENTION.get(wanted)
    if flag is not None and not getattr(model, flag, False):
        offers = ["auto", "eager", *(name for name, flag in ATTENTION.items() if getattr(model, flag, False))]
        hint = f"(hint: model.attn_implementation: {', '.join(offers)})"
        raise ModelError(f"{type(model).__name__} has no attention `{wanted}` {hint}")
    prepare_for_training(model, recipe)


def available_attention(wanted: str, device: str | torch.device) -> str:
    """What the recipe asks for; flash attention only where it is: it computes the same, if faster."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    here = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    lacking = wanted in here and (torch.device(device).type != "cuda" or not here[wanted]())
    return "auto" if lacking else wanted


def load_trained(
    recipe: Recipe,
    base: Path,
    device: str | torch.device = "cpu",
    snapshot: Path | None = None,  # folder of x' of a later round; None: x_0
    quantized: bool = True,  # False: a base that the recipe wants quantized is loaded as it is stored
) -> nn.Module:
    """The model as it is trained, what is trained of it in float32: x_0, or x' of a snapshot.

    Errors: ModelError.
    """
    wanted, attention = recipe.model, available_attention(recipe.model.attn_implementation, device)
    code = wanted.trust_remote_code
    if recipe.lora is None:
        whole = load_model(snapshot or base, attention, device, code=code)
        return prepare_for_training(with_liger_kernels(whole, recipe), recipe)
    bits = None
    if wanted.quantized and quantized:
        bits = Quantized(wanted.load_in_4bit, wanted.bnb_4bit_quant_type)
    kind: torch.dtype | Literal["auto"] = "auto" if wanted.dtype == "auto" else DTYPES[wanted.dtype]
    model = prepare_for_training(
        with_liger_kernels(load_model(base, attention, device, kind, bits, code), recipe), recipe
    )
    with closing(open_trained(recipe, base, snapshot)) as x, torch.no_grad():
        layout = layout_of(model)
        if layout != x.layout:
            raise ModelError(f"{snapshot or base}: other adapters than those of the recipe")
        vector = torch.from_numpy(x.read(0, layout.size))
        trained = (p for p in model.parameters() if p.requires_grad)
        for parameter, view in zip(trained, layout.views(vector), strict=True):
            parameter.copy_(view)
    return model


def open_trained(recipe: Recipe, base: Path, snapshot: Path | None = None) -> StoredVector:
    """x_0, or x' of a snapshot of this run. Errors: ModelError."""
    if recipe.lora is None:
        return open_vector(snapshot or base, recipe.model.trust_remote_code)
    return _opened(recipe, base, snapshot) if snapshot else _drawn(recipe, base)


def _drawn(recipe: Recipe, base: Path) -> StoredVector:
    model: Any = meta_trained_model(recipe, base)
    layout, parts = layout_of(model), list[StoredTensor]()
    with ExitStack() as files:
        copied: StoredVector | None = None
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            drawn = initial_value(name, shape, recipe.training.seed)
            if drawn is not None:
                parts.append(stored_from_tensor(torch.from_numpy(drawn)))
                continue
            if copied is None:
                opened_base = open_vector(base, recipe.model.trust_remote_code)
                copied = files.enter_context(closing(opened_base))
            parts.append(copied.part(base_parameter_name(name)))
        opened = files.pop_all()
    return _adapter(recipe, base, model, tuple(parts), opened)


def _opened(recipe: Recipe, base: Path, folder: Path) -> StoredVector:
    """Also of a snapshot whose file came under another name."""
    model: Any = meta_trained_model(recipe, base)
    layout, names = layout_of(model), stored_names(model)
    with ExitStack() as files:
        tensors = open_tensors(folder, files)
        opened = files.pop_all()
    stored = [tensors.get(names[name]) for name in layout.names]
    if [part and (part.dtype, part.shape) for part in stored] != [("F32", shape) for shape in layout.shapes]:
        opened.close()
        raise ModelError(f"{folder} holds other adapters than those of the recipe")
    return _adapter(recipe, base, model, tuple(part for part in stored if part), opened)


def count_trainable(recipe: Recipe, base: Path) -> int:
    """P. Reads headers and configs only, where that is enough. Errors: ModelError."""
    if recipe.lora is not None:
        return layout_of(meta_trained_model(recipe, base)).size
    with closing(open_vector(base, recipe.model.trust_remote_code)) as vector:
        return vector.layout.size


def autocast_dtype(training: Training, model: nn.Module, device: torch.device) -> torch.dtype | None:
    """What forward passes are computed in; None: as the weights are."""
    if training.fp16:
        return torch.float16
    if isinstance(training.bf16, bool):
        return torch.bfloat16 if training.bf16 else None
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for half in (torch.bfloat16, torch.float16):
        if half in kinds and len(kinds) > 1:  # a frozen base, and adapters in float32
            return half
    gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if gpu and kinds == {torch.float32} else None


# ---- small -------------------------------------------------------------------------------------------------


def _adapter(
    recipe: Recipe, base: Path, model: PeftModel, parts: tuple[StoredTensor, ...], files: ExitStack
) -> StoredVector:
    layout, names = layout_of(model), stored_names(model)
    name, revision = recipe.model.model_name_or_path, cached_commit(base)
    local = Path(name).expanduser()  # the owner's own folder, also where its weights were written anew
    called = name if revision is not None else str((local if local.is_dir() else base).absolute())
    texts = {CONFIG: adapter_config_text(model, called, revision)}
    stored = tuple(names[name] for name in layout.names)
    return StoredVector(layout, stored, parts, {}, files, texts=texts, file=ADAPTER_FILE)


def base_parameter_name(name: str) -> str:
    """base_model.model.lm_head.modules_to_save.default.weight -> lm_head.weight"""
    return name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
