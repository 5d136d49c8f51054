"""The model classes of the shipped recipes, and some beside, at sizes at which a test costs nothing."""

from typing import Any

import torch
import transformers

from recipes.models import BUILTIN_MODELS

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
    return transformers.AutoConfig.for_model(kind, vocab_size=vocabulary, **SIZES[kind], **more)


def tiny_model(kind: str, vocabulary: int = 96, attention: str | None = None) -> Any:
    """Drawn at random, the same each time, with weights that are large enough to see what attention does."""
    torch.manual_seed(1)
    chosen = {} if attention is None else {"attn_implementation": attention}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config(kind, vocabulary, **ends), **chosen
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
    return model


BUILTIN = BUILTIN_MODELS["builtin:tiny-gpt-neox"]
VOCABULARY = 320  # of the builtin tokenizer
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NARROW = {"n_embd": 32, "n_layer": 2, "n_head": 2}

CONFIGS: dict[str, Any] = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON, **WIDTH, max_position_embeddings=64),
    "gptj": lambda: transformers.GPTJConfig(**COMMON, **NARROW, n_positions=64, rotary_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**COMMON, **NARROW, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        **COMMON, **WIDTH, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64
    ),
    "llama": lambda: transformers.LlamaConfig(
        **COMMON, **WIDTH, num_key_value_heads=1, max_position_embeddings=64
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON, **WIDTH, num_key_value_heads=1, head_dim=16, max_position_embeddings=64
    ),
}
TIED = ("gpt2", "opt")
GROUPED: dict[str, Any] = {**COMMON, **WIDTH, "num_key_value_heads": 1, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CLASSES: dict[str, Any] = {
    **CONFIGS,
    "gemma": lambda: transformers.GemmaConfig(**GROUPED, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=8),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=16),
    "qwen3_tied": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),
}
