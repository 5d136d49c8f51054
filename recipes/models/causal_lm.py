"""Hugging Face causal language models: load, measure, write out, and let speak.

A model comes from the folder of a base (recipes.base) and leaves as such a folder, with the trained vector in
it. Weights are tensors: safetensors, or `.bin` through `torch.load(weights_only=True)`, which is what
transformers does.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from recipes.data import Sample, batches, collate
from recipes.downloads import from_pretrained_options
from recipes.errors import ModelError
from recipes.weight_files import (
    FlatParameters,
    Layout,
    atomic_folder,
    check_model_folder,
    layout_of,
    quiet_transformers,
)

from .base_model import (
    Base,
    BaseFile,
    base_manifest,
    check_fit,
    fetch_model,
    load_tokenizer,
    open_tokenizer,
    prepare_base,
)
from .lora import adapter_base, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Base",
    "BaseFile",
    "FlatParameters",
    "Layout",
    "TextGenerator",
    "base_manifest",
    "check_fit",
    "evaluate",
    "export",
    "generate",
    "layout_of",
    "load_model",
    "load_tokenizer",
    "logits_of",
    "loss_sum",
    "open_tokenizer",
    "prepare_base",
]


@dataclass(frozen=True)
class Quantized:
    """How bitsandbytes holds a frozen base."""

    four: bool  # bits; else 8
    kind: str = "nf4"  # of 4 bits

    def config(self, computed: torch.dtype) -> Any:
        """Errors: ModelError where bitsandbytes is not installed."""
        if find_spec("bitsandbytes") is None:
            hint = "(hint: pip install 'cocktail-sgd[bnb]')"
            raise ModelError(f"a base in 8 or 4 bits needs bitsandbytes, which is not here {hint}")
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=self.four,
            load_in_8bit=not self.four,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_compute_dtype=computed,
        )


def load_model(
    folder: Path,
    attn_implementation: str = "auto",
    device: str | torch.device = "cpu",
    kind: torch.dtype | Literal["auto"] = torch.float32,  # of the weights; auto: as they are stored
    quantized: Quantized | None = None,
    code: bool = False,  # run that of the folder
) -> PreTrainedModel:
    """The causal LM in `folder`, in evaluation mode. Errors: ModelError."""
    from transformers import AutoModelForCausalLM

    from recipes.weight_files import open_tensors

    check_model_folder(Path(folder))
    with ExitStack() as files:
        open_tensors(Path(folder), files)  # codes of quantized weights would be taken for numbers
    chosen: dict[str, Any] = dict(from_pretrained_options(Path(folder), code))
    if attn_implementation != "auto":
        chosen["attn_implementation"] = attn_implementation
    if quantized is not None:
        computed = torch.bfloat16 if kind == "auto" else kind
        chosen |= {"quantization_config": quantized.config(computed), "device_map": {"": device}}
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=kind,
                output_loading_info=True,
                **chosen,
            )
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        if "weights_only" in str(error):  # torch's own words go on to say how to run it all the same
            raise ModelError(
                f"{folder}: a .bin file with more than tensors in it, which could be code"
            ) from error
        message = f"{folder}: transformers cannot load this as a causal language model: {error}"
        raise ModelError(message) from error
    model, told = loaded
    if told["missing_keys"] or told["mismatched_keys"]:
        # transformers would draw them at random, and each peer would have another model
        missing = sorted(str(key) for key in [*told["missing_keys"], *told["mismatched_keys"]])
        raise ModelError(f"{folder}: the weights lack {', '.join(missing[:3])} ({len(missing)} in all)")
    return (model if quantized else model.to(device)).eval()


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(B, T, V), of a batch as `collate` makes it, with or without labels.

    Without a cache: where there is one, transformers lets packed documents see each other.
    """
    given = {name: tensor for name, tensor in batch.items() if name != "labels"}
    shape = batch["input_ids"].shape
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    if "position_ids" in given and attention.startswith("flash"):  # it tells documents apart in one row only
        given = {name: tensor.reshape(1, -1) for name, tensor in given.items()}
    logits: Tensor = model(**given, use_cache=False).logits
    return logits.reshape(*shape, -1)


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Sum of the token losses in nats, and how many there are: labels other than -100 after the shift by one.

    A sum and not a mean: parts of a batch that are computed apart (micro-batches, peers) must add up to the
    whole.
    """
    logits = logits_of(model, batch)
    targets = batch["labels"][:, 1:].reshape(-1)  # (B (T-1),): position t predicts token t+1
    scores = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    loss = nn.functional.cross_entropy(scores, targets, ignore_index=-100, reduction="sum")
    return loss, int((targets != -100).sum())


@torch.no_grad()
def evaluate(model: nn.Module, samples: Sequence[Sample], batch_size: int, pad: int = 0) -> tuple[float, int]:
    """(sum of token losses, number of tokens) over `samples`; the mean loss is their quotient."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for part in batches(samples, batch_size):
            batch = {key: value.to(device) for key, value in collate(part, pad).items()}
            loss, tokens = loss_sum(model, batch)
            total += float(loss)
            count += tokens
    finally:
        model.train(training)
    return total, count


def export(
    folder: Path,
    base_folder: Path,
    vector: Tensor,  # (P,) float32
    layout: Layout,
    tokenizer: PreTrainedTokenizerBase | None = None,  # None: the base folder's
) -> Path:
    """Write the base with `vector` in place of its parameters, and its tokenizer: a folder for
    `from_pretrained`.

    Written beside and moved into place, so that `folder` never holds half a model. Weights are FP32 whatever
    the base came in, so that the loss of the folder is the loss of the vector.
    Errors: ModelError where `layout` is not the base's.
    """
    folder = Path(folder)
    model = load_model(base_folder)
    if layout_of(model) != layout:
        raise ModelError(f"{base_folder} has other parameters than the vector of {layout.size} numbers")
    FlatParameters(model).vector.copy_(vector)
    with atomic_folder(folder) as part, quiet_transformers():
        model.save_pretrained(part)
        (tokenizer or open_tokenizer(Path(base_folder))).save_pretrained(part)
    return folder


def load_adapted(folder: Path, code: bool = False) -> nn.Module:
    """The model of an adapter's folder: the base that it names, and the adapter. Errors: ModelError."""
    from peft import PeftModel

    name, revision = adapter_base(folder)
    base = Path(name) if Path(name).is_dir() else fetch_model(name, revision, code)
    plain = load_model(base, code=code)
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what peft calls in transformers
        model: nn.Module = PeftModel.from_pretrained(plain, folder).eval()
    return model


class TextGenerator:
    """A model that was loaded to write, once or many times.

    Args:
        folder: of the model, or of an adapter.
        code: run that of the folder.
        tokenizer: folder of another tokenizer than the model's own.
    """

    def __init__(self, folder: Path, code: bool = False, tokenizer: Path | None = None) -> None:
        folder = Path(folder)
        self.tokenizer = open_tokenizer(tokenizer or folder, code=code)
        self.model: Any = load_adapted(folder, code) if is_adapter(folder) else load_model(folder, code=code)

    @torch.no_grad()
    def write(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int | None = None,
        special: bool = True,  # begin as the tokenizer begins a text
    ) -> str:
        """What the model writes after `prompt`; temperature 0 takes the likeliest token each time."""
        if seed is not None:
            torch.manual_seed(seed)
        tokenizer = self.tokenizer
        inputs = tokenizer(
            prompt or tokenizer.eos_token,
            return_tensors="pt",
            return_token_type_ids=False,
            add_special_tokens=special,
        )
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        write, pad = self.model.generate, tokenizer.pad_token_id
        tokens = write(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)
        return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def answer(
        self, said: Sequence[Mapping[str, str]], max_new_tokens: int, temperature: float, seed: int | None
    ) -> str:
        """What it says next in a conversation; without a chat template it goes on from what was said last."""
        if self.tokenizer.chat_template is None:
            return self.write(said[-1]["content"], max_new_tokens, temperature, seed)
        apply: Any = self.tokenizer.apply_chat_template
        text = apply(list(said), tokenize=False, add_generation_prompt=True)
        return self.write(text, max_new_tokens, temperature, seed, special=False)


def generate(
    folder: Path,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int | None = None,
    code: bool = False,  # run that of the folder
) -> str:
    """What the model in `folder` writes after `prompt`."""
    return TextGenerator(folder, code).write(prompt, max_new_tokens, temperature, seed)
