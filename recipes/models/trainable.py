"""The trained part of a model: all parameters, or adapters. Either way x is a vector of P numbers.

                    trained          x_0                       a snapshot's folder
    full            every parameter  the base's weights        config.json, model.safetensors
    `lora:`         the adapters     drawn from the seed       adapter_config.json, adapter_model.safetensors

Adapters are PEFT's (LoRA, Hu et al., 2021), beside a frozen base; only they are trained and exchanged.

    y = W x + s B A x      A: (r, in), drawn from the seed      B: (out, r), 0      s = alpha / r
    y = m V x / |V|        DoRA (Liu et al., 2024): V = W + s B A, m: (out,), at first |W|; |.| of each row

x_0 must be bit-identical at every peer, whatever its device and version of torch: A is drawn from a raw PCG64
stream, with one rounding an element. PEFT's own initialization has the same variance.

The vector comes from files and a model on the meta device, or from a loaded model. A model larger than a
device, or a host, is never there as a whole: it is built on the meta device, and its parameters are filled
one block at a time.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from recipes.config import Lora, Recipe, Training
from recipes.downloads import from_pretrained_options
from recipes.errors import ModelError
from recipes.foreign_json import read_object
from recipes.hardware import HalfPrecision, half_precision
from recipes.weight_files import (
    ADAPTER_FILE,
    CONTINUE,
    FLOATS,
    UNQUANTIZED,
    WIDTHS,
    StoredTensor,
    StoredVector,
    layout_of,
    meta_model,
    model_of_config,
    open_tensors,
    quiet_transformers,
    stored_from_tensor,
)

from .base_model import cached_commit, context_of
from .causal_lm import Visible, load_model, open_vector, visible_in
from .fused_kernels import with_liger_kernels

if TYPE_CHECKING:
    from peft import PeftModel


# ---- adapters ----------------------------------------------------------------------------------------------

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


@dataclass
class Adapter:
    """peft's layer around one weight of the base, on the meta device, and its trained values."""

    layer: Any
    values: dict[str, Tensor] = field(default_factory=dict)  # by name in the layer, float32

    def merged(self, weight: Tensor) -> Tensor:
        """Compute, with peft, the weight that alone does what `weight` does with its adapter."""
        base, name = self.layer.get_base_layer(), getattr(self.layer, "parameter_name", "weight")
        base.load_state_dict({name: weight}, strict=False, assign=True)
        unknown = self.layer.load_state_dict(self.values, strict=False, assign=True).unexpected_keys
        assert not unknown, unknown
        self.layer.merge()
        found: Tensor = getattr(base, name).detach()
        self.layer.to("meta")
        return found


def split_adapters(model: Any, values: Mapping[str, Tensor]) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Map weights of the base to their adapters, and weights trained in full to their values.

    Args:
        model: with adapters, on the meta device.
        values: trained parameter of `model` -> its values.
    """
    modules, adapters, full = dict(model.named_modules()), dict[str, Adapter](), dict[str, Tensor]()
    for name, part in values.items():
        module, lora, rest = name.partition(".lora_")
        if lora:
            layer = modules[module]
            adapters.setdefault(adapted_weight(layer, module), Adapter(layer)).values[f"lora_{rest}"] = part
        else:
            full[base_parameter_name(name)] = part
    return adapters, full


def adapted_weight(layer: Any, name: str) -> str:
    """Name, in the base, of the weight that peft's layer `name` adapts. Adapters of several parameters of one
    module are layers around each other."""
    outer = base_parameter_name(name)
    while outer.endswith(".base_layer"):
        outer = outer.removesuffix(".base_layer")
    return f"{outer}.{getattr(layer, 'parameter_name', 'weight')}"


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


# ---- the trained vector ------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}


def trained_dtype(recipe: Recipe) -> torch.dtype:
    """Dtype in which the model holds its trained parameters."""
    named = recipe.lora is None and recipe.model.dtype != "auto"
    return DTYPES[recipe.model.dtype] if named else torch.float32


def prepare_for_training(
    model: PreTrainedModel, recipe: Recipe, device: str | torch.device = "cpu"
) -> nn.Module:
    """Switch activation checkpointing as the recipe says, and add its adapters to a frozen base.

    device: where it will train.
    Errors: ModelError where the model's class cannot do that.
    """
    training = recipe.training
    if training.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        options = dict(training.activation_checkpointing_kwargs)
        if torch.device(device).type == "cpu":
            options.pop("offload", None)  # activations are in host memory already
        try:
            with quiet_transformers():
                enable(**options)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{error} (hint: training.activation_checkpointing=false)") from error
    made: nn.Module = model if recipe.lora is None else add_adapters(model, recipe.lora)
    if not recipe.objective.dropout:
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return made


def meta_trained_model(recipe: Recipe, base: Path) -> nn.Module:
    """Build the model that is trained on the meta device: names, shapes and dtypes. Errors: ModelError, also
    where peers bring a model of their own."""
    if not recipe.datasets:
        raise ModelError("this run has no model that cocktail could build", "its peers bring their own")
    as_stored = recipe.lora is not None and recipe.model.dtype == "auto"
    dtype = None if as_stored else DTYPES.get(recipe.model.dtype, torch.float32)
    return prepare_for_training(meta_model(base, dtype, recipe.model.trust_remote_code), recipe)


def check_trainable(recipe: Recipe, base: Path) -> None:
    """Raise ModelError where the class of this base lacks the recipe's attention or checkpointing."""
    model = meta_model(base, code=recipe.model.trust_remote_code)
    wanted = recipe.model.attn_implementation
    flag = ATTENTION.get(wanted)
    if flag is not None and not getattr(model, flag, False):
        offers = ["auto", "eager", *(name for name, flag in ATTENTION.items() if getattr(model, flag, False))]
        hint = f"(hint: model.attn_implementation: {', '.join(offers)})"
        raise ModelError(f"{type(model).__name__} has no attention `{wanted}` {hint}")
    prepare_for_training(model, recipe)


def check_fit(recipe: Recipe, folder: Path) -> None:
    """Check that a model's weights are numbers, that its tokens see none that follow, nor another document
    where documents are packed, and that it can read samples of this length.

    Reads the config, and the headers of weights that are there. Errors: ModelError with what was met and what
    was expected.
    """
    context = context_of(folder)
    if quantized := read_object(Path(folder) / "config.json").get("quantization_config"):
        with ExitStack() as files:
            kinds = {tensor.dtype for tensor in open_tensors(folder, files).values()}
        if not kinds or kinds - WIDTHS.keys():
            method = (isinstance(quantized, dict) and quantized.get("quant_method")) or "quantized"
            raise ModelError(f"the model's weights are {method} codes, not numbers in {FLOATS}", UNQUANTIZED)
    if (seen := visible_by_config(folder, recipe.model.trust_remote_code)) is not None:
        if seen.later:
            raise ModelError(f"{folder}: in {seen.name} tokens see later ones, so it cannot {CONTINUE}")
        if recipe.data.isolates_documents and not recipe.model.attn_implementation.startswith("fl"):
            seen.check_isolation()
    if context is not None and recipe.data.max_length > context:
        raise ModelError(
            f"data.max_length is {recipe.data.max_length}, the model's context only {context} "
            f"(hint: data.max_length={context})"
        )


def visible_by_config(folder: Path, code: bool = False) -> Visible | None:
    """Try the model of a config with two narrow layers, eight tokens and random weights; None where its class
    allows none of that. Errors: ModelError where it is no causal language model.
    """
    chosen = {"trust_remote_code": code, "dtype": torch.float32, "experts_implementation": "eager"}
    meta_model(folder, code=code)  # says what is wrong with it
    try:
        with parameters_on_meta(), torch.random.fork_rng(devices=[]):
            config = AutoConfig.from_pretrained(folder, **from_pretrained_options(folder, code))
            text = config.get_text_config(decoder=True)
            known, width = text.to_dict(), text.hidden_size
            head = known.get("head_dim") or width // getattr(text, "num_attention_heads", width)
            sizes = {name: 8 for name in ("head_dim", "rotary_dim") if known.get(name)}
            sizes |= {name: 64 for name in ("intermediate_size", "moe_intermediate_size") if known.get(name)}
            sizes |= {"hidden_size": width // max(head // 8, 1), "num_hidden_layers": 2, "vocab_size": 8}
            cut = {name: getattr(text, name)[:2] for name in layer_lists(text)}
            for name, value in {**cut, **sizes, "pad_token_id": None}.items():
                setattr(text, name, value)
            untyped: Any = AutoModelForCausalLM
            model = untyped.from_config(config, **chosen)
            torch.manual_seed(0)
            used = {*model.parameters()}
            if text is not config:
                used = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
            for module in model.modules():
                for name, empty in module.named_parameters(recurse=False):
                    drawn = torch.zeros(1).expand(empty.shape)  # no memory, for parts that see no text
                    if empty in used:
                        drawn = torch.randn(empty.shape) * empty.shape[-1] ** -0.5 + (empty.dim() < 2)
                    module._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        return visible_in(model)
    except Exception:  # any kind: the class knows no such sizes, or computes nothing of this kind on a CPU
        return None


def layer_lists(config: Any) -> list[str]:
    """Name what a config lists layer by layer."""
    count = config.num_hidden_layers
    return [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == count
    ]


def available_attention(wanted: str, device: str | torch.device) -> str:
    """Attention to use: `wanted`, or `auto`, which computes the same, where flash attention is missing."""
    here = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    lacking = wanted in here and (torch.device(device).type != "cuda" or not here[wanted]())
    return "auto" if lacking else wanted


def load_trained(
    recipe: Recipe,
    base: Path,
    device: str | torch.device = "cpu",
    snapshot: Path | None = None,  # folder of x' of a later round; None: x_0
    quantized: bool = True,  # False: load a base that the recipe quantizes as it is stored
) -> nn.Module:
    """Load the model that is trained, its trained parameters in float32: x_0, or x' of a snapshot.

    A frozen base is loaded to `device`. A model that is trained whole stays in the host's memory, from where
    `build_peer` brings it there: a device has no room for it twice.

    Errors: ModelError.
    """
    wanted, attention = recipe.model, available_attention(recipe.model.attn_implementation, device)
    code = wanted.trust_remote_code
    if recipe.lora is None:
        full = load_model(snapshot or base, attention, code=code)
        return prepare_for_training(with_liger_kernels(full, recipe, device), recipe, device)
    bits = wanted if wanted.quantized and quantized else None
    loaded = load_model(base, attention, device, frozen_dtype(recipe, base, device) or "auto", bits, code)
    model = prepare_for_training(with_liger_kernels(loaded, recipe, device), recipe, device)
    with closing(open_trained(recipe, base, snapshot)) as x, torch.no_grad():
        layout = layout_of(model)
        if layout != x.layout:
            said = f"{snapshot or base}: other adapters than those of the recipe"
            raise ModelError(said, "the recipe that they were trained with")
        vector = torch.from_numpy(x.read(0, layout.size))
        trained = (p for p in model.parameters() if p.requires_grad)
        for parameter, view in zip(trained, layout.views(vector), strict=True):
            parameter.copy_(view)
    return model


def open_trained(recipe: Recipe, base: Path, snapshot: Path | None = None) -> StoredVector:
    """Open x_0, or x' of a snapshot of this run. Errors: ModelError."""
    if (own := recipe.objective.open_trained(snapshot or base)) is not None:
        opened: StoredVector = own
        return opened
    if recipe.lora is None:
        return open_vector(snapshot or base, recipe.model.trust_remote_code)
    return _open_adapter(recipe, base, snapshot) if snapshot else _draw_adapter(recipe, base)


def _draw_adapter(recipe: Recipe, base: Path) -> StoredVector:
    """Draw x_0 from the seed; copies of base weights (`modules_to_save`) are read from the base."""
    model = meta_trained_model(recipe, base)
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
            if "lora_magnitude_vector" in name:
                layer: Any = model.get_submodule(name.partition(".lora_magnitude_vector")[0])
                parts.append(stored_from_tensor(torch.from_numpy(_magnitudes(copied, layer, name, shape))))
            else:
                parts.append(copied.part(base_parameter_name(name)))
        opened = files.pop_all()
    return _adapter_vector(recipe, base, model, tuple(parts), opened)


def _magnitudes(base: StoredVector, layer: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Compute what DoRA's magnitudes are at first: the norms of the rows of the base's weight."""
    part = base.part(adapted_weight(layer, name.partition(".lora_magnitude_vector")[0]))
    values = part.floats(0, prod(part.shape)).reshape(part.shape)
    transposed = isinstance(layer.get_base_layer(), nn.Embedding | Conv1D)  # (in, out)
    return row_norms(values.T if transposed else values).reshape(shape)


def _open_adapter(recipe: Recipe, base: Path, folder: Path) -> StoredVector:
    """Open the adapters of a snapshot, whatever the name of its safetensors file."""
    model: Any = meta_trained_model(recipe, base)
    layout, names = layout_of(model), stored_names(model)
    with ExitStack() as files:
        tensors = open_tensors(folder, files)
        opened = files.pop_all()
    stored = [tensors.get(names[name]) for name in layout.names]
    if [part and (part.dtype, part.shape) for part in stored] != [("F32", shape) for shape in layout.shapes]:
        opened.close()
        said = f"{folder} holds other adapters than those of the recipe"
        raise ModelError(said, "the recipe that they were trained with")
    return _adapter_vector(recipe, base, model, tuple(part for part in stored if part), opened)


def _adapter_vector(
    recipe: Recipe, base: Path, model: Any, parts: tuple[StoredTensor, ...], files: ExitStack
) -> StoredVector:
    layout, names = layout_of(model), stored_names(model)
    name, revision = recipe.model.model_name_or_path, cached_commit(base)
    local = Path(name).expanduser()  # the host's own folder, also where its weights were converted
    base_name = name if revision is not None else str((local if local.is_dir() else base).absolute())
    texts = {CONFIG: adapter_config_text(model, base_name, revision)}
    stored = tuple(names[name] for name in layout.names)
    return StoredVector(layout, stored, parts, {}, files, config_files=texts, file_name=ADAPTER_FILE)


def count_trainable(recipe: Recipe, base: Path) -> int:
    """Count the trained parameters, P, from headers and configs where they suffice. Errors: ModelError."""
    if recipe.lora is not None:
        return layout_of(meta_trained_model(recipe, base)).size
    with closing(open_trained(recipe, base)) as vector:
        return vector.layout.size


def autocast_dtype(training: Training, model: nn.Module, here: HalfPrecision) -> torch.dtype | None:
    """Dtype that forward passes are autocast to on a device; None: that of the weights."""
    if training.fp16:
        return torch.float16
    if isinstance(training.bf16, bool):
        return torch.bfloat16 if training.bf16 else None
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtypes == {torch.float32}:
        return here.dtype if here.pays else None
    if dtypes == {torch.bfloat16} == {here.dtype}:
        return None
    return here.dtype if torch.bfloat16 in dtypes else torch.float16


def frozen_dtype(recipe: Recipe, base: Path, device: str | torch.device) -> torch.dtype | None:
    """Dtype in which the frozen base of adapters is loaded; None: as it is stored. Weights in bfloat16 become
    float16 on a device that only emulates bfloat16, unless the recipe insists (`training.bf16`)."""
    named = DTYPES.get(recipe.model.dtype)
    config = read_object(base / "config.json")
    stored = named or DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    here = half_precision(torch.device(device)).dtype
    return here if stored == torch.bfloat16 and recipe.training.bf16 == "auto" else named


# ---- a model filled block by block -------------------------------------------------------------------------


def build_on_meta(base: Path, recipe: Recipe, device: torch.device) -> Any:
    """Build the model like `load_trained`: parameters without memory, buffers as they should be.

    Raises:
        ModelError: also where buffers are stored with its weights: parameters alone do not make it.
    """
    wanted = recipe.model
    attention = available_attention(wanted.attn_implementation, device)
    chosen: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    # trained weights are masters in float32, whatever is computed in
    dtype = torch.float32 if recipe.lora is None else frozen_dtype(recipe, base, device)
    if dtype is not None:
        chosen["dtype"] = dtype
    with parameters_on_meta():
        model = model_of_config(base, wanted.trust_remote_code, **chosen)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if stored := sorted(model.state_dict().keys() - names):
        raise ModelError(f"{base}: the buffer {stored[0]} cannot be spread over several devices", "--gpus 1")
    with parameters_on_meta():
        return prepare_for_training(model, recipe)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are made inside on the meta device. One thread at a time, under the
    lock of transformers' loading: modules that another makes meanwhile have theirs there, too."""
    with quiet_transformers():
        register = nn.Module.register_parameter

        def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and not parameter.is_meta:  # one that is: tied to another
                parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            register(module, name, parameter)

        nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def frozen_name(stored: StoredVector, name: str) -> str:
    """Name in the layout of the base what a model with adapters calls so, and does not train."""
    name = base_parameter_name(name).replace(".base_layer", "").replace(".original_module", "")
    return stored.tied.get(name, name)
