"""The family: what CocktailSGD and its relatives relax, as one description with presets.

All of them are Algorithm 1 with a C, a number H of local steps, and an outer step at the owner:

    H optimizer steps at every peer, then  d_i = x_i - x';  send C[d_i];  x_i and x' move by C[D]
    what C leaves out of d_i is multiplied by `error_decay`
    owner: u = rate sum_i w_i C[d_i];  v <- momentum v + u;  D = u + momentum v + e
           e <- owner_error_decay (D - C[D])

The description is the recipe's `compression` section. A preset is a name for what its paper says of it: the
keys that a recipe does not write, and the `adam_beta1` that goes with them. `cocktail` is the schema's
defaults, which are those of our quality study. No code asks for the name, so each key may be changed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

USUAL = {"adam_beta1": 0.9}


@dataclass(frozen=True)
class Preset:
    what: str
    paper: str
    keys: Mapping[str, Any]  # of the `compression` section; all others have the defaults of schema.py
    training: Mapping[str, Any] = field(default_factory=lambda: USUAL)  # likewise


MEAN: dict[str, Any] = {"outer_learning_rate": 1.0}
EVERYTHING: dict[str, Any] = {**MEAN, "random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 16}
FRESH: dict[str, Any] = {**EVERYTHING, "staleness": 0}

PRESETS: dict[str, Preset] = {
    "cocktail": Preset(
        "sampled, sparse and quantized, hidden behind the next step",
        "CocktailSGD, as below; the sum for the mean, bits and betas: our quality study (LOG.md)",
        {},
        {},
    ),
    "cocktail-paper": Preset(
        "the same as its paper and its reference implementation have it: the mean, in 4 bits",
        "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks, Wang et al., ICML 2023",
        {**MEAN, "random_ratio": 0.1, "topk_ratio": 0.2, "quant_bits": 4},
    ),
    "cocktail-wide": Preset(
        "three times as many coordinates visited, and fewer of each visit sent: for 8 peers and more",
        "CocktailSGD, as above; p, K, bits and no momentum: our quality study (LOG.md)",
        {"random_ratio": 0.38, "topk_ratio": 0.047, "quant_bits": 1},
        {"adam_beta1": 0.0},
    ),
    "lora-cocktail": Preset(
        "adapters are small: all of them each step, in 4 bits, hidden behind the next step",
        "CocktailSGD, as above; LoRA: Low-Rank Adaptation of Large Language Models, Hu et al., 2021",
        {**EVERYTHING, "quant_bits": 4},
    ),
    "allreduce": Preset(
        "everything each step, waited for: with `optim: sgd` synchronous SGD on the whole batch",
        "Sergeev and Del Balso, Horovod, 2018, is the usual reference for the pattern",
        FRESH,
    ),
    "local-sgd": Preset(
        "each peer makes some steps alone, then models are averaged",
        "Local SGD Converges Fast and Communicates Little, Stich, 2018 (ICLR 2019)",
        {**FRESH, "local_steps": 8},
    ),
    "diloco": Preset(
        "many steps alone, then one outer step with Nesterov momentum along the mean",
        "DiLoCo: Distributed Low-Communication Training of Language Models, Douillard et al., 2023",
        {**FRESH, "local_steps": 500, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    ),
    "streaming-diloco": Preset(
        "DiLoCo, a tenth of the layers at a time, in 4 bits, while the peers go on: each once in 100 steps",
        "Streaming DiLoCo with overlapping communication, Douillard et al., 2025",
        {
            "sample_kind": "fragment",
            "random_ratio": 0.1,
            "topk_ratio": 1.0,
            "quant_bits": 4,
            "local_steps": 10,
            "staleness": 1,
            "outer_learning_rate": 0.4,
            "outer_momentum": 0.9,
        },
    ),
    "sparseloco": Preset(
        "30 steps alone, then 64 of each 4,096 values in 2 bits; what stays decays, in the place of momentum",
        "Communication Efficient LLM Pre-training with SparseLoCo, Sarfi et al., 2025",
        {
            **MEAN,
            "random_ratio": 1.0,
            "topk_ratio": 64 / 4096,
            "topk_chunk": 4096,
            "quant_bits": 2,
            "local_steps": 30,
            "staleness": 0,
            "error_decay": 0.95,
        },
    ),
    "onebit": Preset(
        "everything each step in 1 bit, errors kept on both sides, after 100 steps of 16 bits",
        "1-Bit Stochastic Gradient Descent, Seide et al., 2014; 1-bit Adam, Tang et al., 2021",
        {**FRESH, "quant_bits": 1, "uncompressed_steps": 100},
    ),
}
