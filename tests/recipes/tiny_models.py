"""The model classes of the shipped recipes, and some beside, at sizes at which a test costs nothing."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8, "n_positions": 2048},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 2},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
    },
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
    },
}
SIZES |= {"mistral": SIZES["llama"], "qwen2": SIZES["llama"], "qwen3": SIZES["llama"] | {"head_dim": 16}}


def tiny_config(kind: str, vocabulary: int = 96, **more: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, vocab_size=vocabulary, **SIZES[kind], **more)


def tiny_model(kind: str, vocabulary: int = 96, attention: str | None = None) -> Any:
    """Drawn at random, the same each time, with weights that are large enough to see what attention does."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    chosen = {} if attention is None else {"attn_implementation": attention}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(tiny_config(kind, vocabulary, **ends), **chosen).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model
