"""Hugging Face causal language models: load, export, generate text.

A model comes from the folder of a base and leaves as such a folder, with the trained vector in it. Weights
are tensors: safetensors, or `.bin` through `torch.load(weights_only=True)`, as transformers does. Only a
folder of this machine's user has `.bin` alone: what comes from a hub has no such name, and an index no
other files.
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
from torch import nn

from recipes.downloads import from_pretrained_options
from recipes.errors import MissingPackage, ModelError
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

from .base_files import AS_SAFETENSORS, WEIGHTS
from .base_model import fetch_model, open_tokenizer
from .lora import adapter_base, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Quantized:
    """Quantization of a frozen base by bitsandbytes."""

    four_bits: bool  # else 8
    double: bool = False  # scales of 4 bits are quantized too

    def config(self, compute_dtype: torch.dtype) -> Any:
        """Build transformers' BitsAndBytesConfig. Errors: MissingPackage."""
        if find_spec("bitsandbytes") is None:
            raise MissingPackage(
                "a base in 8 or 4 bits needs bitsandbytes, which is not installed", "bitsandbytes"
            )
        from transformers import BitsAndBytesConfig

        untyped: Any = BitsAndBytesConfig
        return untyped(
            load_in_4bit=self.four_bits,
            load_in_8bit=not self.four_bits,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=compute_dtype,
        )


def load_model(
    folder: Path,
    attn_implementation: str = "auto",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Literal["auto"] = torch.float32,  # of the weights; auto: as stored
    quantized: Quantized | None = None,
    code: bool = False,  # run the folder's own code
) -> PreTrainedModel:
    """Load the causal LM in `folder`, in evaluation mode. Errors: ModelError."""
    from transformers import AutoModelForCausalLM

    check_model_folder(Path(folder))
    with ExitStack() as files:
        open_tensors(Path(folder), files)  # refuses codes of quantized weights, which would pass for numbers
    chosen: dict[str, Any] = dict(from_pretrained_options(Path(folder), code))
    if any(next(Path(folder).glob(pattern), None) for pattern in WEIGHTS):
        chosen["use_safetensors"] = True  # and no pickle that lies beside them
    if attn_implementation != "auto":
        chosen["attn_implementation"] = attn_implementation
    if quantized is not None:
        compute_dtype = half_precision(torch.device(device)).dtype if dtype == "auto" else dtype
        chosen |= {"quantization_config": quantized.config(compute_dtype), "device_map": {"": device}}
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **chosen
            )
    except Exception as error:  # any kind, from KeyError to ImportError: all mean "not this folder"
        if "weights_only" in str(error):  # torch's own text goes on to say how to run it all the same
            said = f"{folder}: a .bin file with more than tensors in it, which could be code"
            raise ModelError(said, AS_SAFETENSORS) from error
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


def load_adapted(folder: Path, code: bool = False) -> nn.Module:
    """Load an adapter's folder: the base that it names, and the adapter. Errors: ModelError."""
    from peft import PeftModel

    name, revision = adapter_base(folder)
    base = Path(name) if Path(name).is_dir() else fetch_model(name, revision, code)
    plain = load_model(base, code=code)
    with quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft calls deprecated functions of transformers
        model: nn.Module = PeftModel.from_pretrained(plain, folder).eval()
    return model


class TextGenerator:
    """A loaded model with its tokenizer.

    Args:
        folder: of the model, or of an adapter.
        code: run the folder's own code.
        tokenizer: folder of another tokenizer than the model's own.
    """

    def __init__(self, folder: Path, code: bool = False, tokenizer: Path | None = None) -> None:
        folder = Path(folder)
        self.tokenizer = open_tokenizer(tokenizer or folder, code=code)
        self.model: Any = load_adapted(folder, code) if is_adapter(folder) else load_model(folder, code=code)

    @property
    def chats(self) -> bool:
        """True where the tokenizer has a chat template."""
        return self.tokenizer.chat_template is not None

    @torch.no_grad()
    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int | None = None,
        special_tokens: bool = True,  # begin with the tokenizer's special tokens
    ) -> str:
        """Generate the text after `prompt`; temperature 0 takes the likeliest token each time."""
        if seed is not None:
            torch.manual_seed(seed)
        tokenizer = self.tokenizer
        inputs = tokenizer(
            prompt or tokenizer.eos_token,
            return_tensors="pt",
            return_token_type_ids=False,
            add_special_tokens=special_tokens,
        )
        options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        known = self.model.generation_config.eos_token_id
        ends = {*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id} - {None}
        if ends:  # the base of an adapter need not know the eos token that the adapter was trained with
            options["eos_token_id"] = sorted(ends)
        pad = tokenizer.pad_token_id
        tokens = self.model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **options)
        return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    @torch.no_grad()
    def complete(self, tokens: Sequence[int], max_new_tokens: int, max_seconds: float) -> list[int]:
        """Generate the likeliest tokens after these, within a number of tokens and a time."""
        prompt = torch.tensor([list(tokens)])  # (1, T)
        made = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            max_time=max_seconds,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        added: list[int] = made[0, prompt.shape[1] :].tolist()
        return added

    def reply(
        self, messages: Sequence[Mapping[str, str]], max_new_tokens: int, temperature: float, seed: int | None
    ) -> str:
        """Generate the next message of a conversation; without a chat template, continue the last message."""
        if not self.chats:
            return self.generate(messages[-1]["content"], max_new_tokens, temperature, seed)
        apply: Any = self.tokenizer.apply_chat_template
        text = apply(list(messages), tokenize=False, add_generation_prompt=True)
        return self.generate(text, max_new_tokens, temperature, seed, special_tokens=False)
