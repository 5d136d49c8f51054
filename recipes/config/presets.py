"""Presets: CocktailSGD and its relatives as values of one `compression` section.

All are Algorithm 1 with a compressor C, a number H of local steps, and an outer step at the aggregator:

    H optimizer steps at every peer, then  d_i = x_i - x';  send C[d_i];  x_i and x' move by C[D]
    the residual d_i - C[d_i] is multiplied by `error_decay`
    aggregator: u = rate sum_i w_i C[d_i];  v <- momentum v + u;  D = u + momentum v + e
                e <- D - C[D]

A preset supplies the values of its paper for the keys that a recipe does not write. `cocktail` is the
schema's defaults, which come from our quality study; adapters, which are small, it sends whole. No code
branches on a preset's name, so each key may be changed alone.

Under `auto` a run chooses the keys that neither the recipe nor its preset writes, between rounds, by its
lines and the number of its members (transport's leases.py). It chooses among rungs, each a whole tuple of
keys that the quality study has measured:

    p, K, bits, staleness and decay   those of `cocktail-wide`, `cocktail`, `cocktail-thin`; or the recipe's
    H                                 1, then 2, 4 and 8 in rounds of the last of these
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHOSEN = ("random_ratio", "topk_ratio", "quant_bits", "staleness", "error_decay", "local_steps")
OWN_K = {"auto": ("topk_ratio", "quant_bits")}  # a peer's own K, where its line carries less


@dataclass(frozen=True)
class Rung:
    """One setting of a run's rounds."""

    keys: Mapping[str, Any]  # of the `compression` section, as far as they are not the recipe's
    need: float  # steps whose compute an exchange of the recipe's own packets takes; above it the next rung
    peers: int = 1  # members that it is for, at least


WIDE: dict[str, Any] = {"random_ratio": 0.38, "topk_ratio": 0.047, "quant_bits": 1}
THIN: dict[str, Any] = {"random_ratio": 0.0264, "quant_bits": 1, "error_decay": 0.9, "staleness": 2}


def longer(keys: Mapping[str, Any], need: float) -> tuple[Rung, ...]:
    """Return rungs of 1, 2, 4 and 8 local steps; `need`: up to which one step is enough."""
    return tuple(Rung({**keys, "local_steps": steps}, need * steps) for steps in (1, 2, 4, 8))


# LOG.md: below .3 of `cocktail`'s bytes `cocktail-thin` loses less, at .1 it fills the line; H = 2 in place
# of waiting 30 % of the time loses, H = 8 in place of waiting 83 % gains
RUNGS = (Rung(WIDE, 1.0, peers=8), Rung({}, 3.3), *longer(THIN, 20.0))
STEPS = longer({}, 12.0)


@dataclass(frozen=True)
class Preset:
    """Defaults of a published method."""

    what: str
    paper: str
    keys: Mapping[str, Any]  # of the `compression` section; all others keep the defaults of schema.py
    adapters: Mapping[str, Any] = field(default_factory=dict)  # more of them, where adapters are trained


MEAN: dict[str, Any] = {"outer_learning_rate": 1.0}
EVERYTHING: dict[str, Any] = {**MEAN, "random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 16}
DENSE: dict[str, Any] = {**EVERYTHING, "quant_bits": 4}
FRESH: dict[str, Any] = {**EVERYTHING, "staleness": 0}

DEFAULT = "cocktail"
PRESETS: dict[str, Preset] = {
    "cocktail": Preset(
        "sampled, sparse and quantized, overlapped with the next step",
        "CocktailSGD, as below; the sum for the mean, and bits: our quality study (LOG.md)",
        {},
        adapters={**DENSE, "auto": ("topk_ratio", "quant_bits", "local_steps")},
    ),
    "cocktail-paper": Preset(
        "the settings of the paper and its reference implementation: the mean, in 4 bits",
        "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks, Wang et al., ICML 2023",
        {**OWN_K, **MEAN, "random_ratio": 0.1, "topk_ratio": 0.2, "quant_bits": 4},
    ),
    "cocktail-wide": Preset(
        "three times as many coordinates sampled, a smaller K: for 8 peers and more",
        "CocktailSGD, as above; p, K and bits: our quality study (LOG.md)",
        {**OWN_K, **WIDE},
    ),
    "cocktail-thin": Preset(
        "a quarter as many coordinates, as signs, two rounds in flight: for lines of 20 Mbit/s",
        "CocktailSGD, as above; p, bits, decay and staleness: our quality study (LOG.md)",
        {**OWN_K, **THIN},
    ),
    "allreduce": Preset(
        "everything each step, synchronously: with `optim: sgd` SGD on the whole batch",
        "Sergeev and Del Balso, Horovod, 2018, is the usual reference for the pattern",
        FRESH,
    ),
    "local-sgd": Preset(
        "some local steps, then the models are averaged",
        "Local SGD Converges Fast and Communicates Little, Stich, 2018 (ICLR 2019)",
        {**FRESH, "local_steps": 8},
    ),
    "diloco": Preset(
        "many local steps, then one outer step with Nesterov momentum along the mean",
        "DiLoCo: Distributed Low-Communication Training of Language Models, Douillard et al., 2023",
        {**FRESH, "local_steps": 500, "outer_learning_rate": 0.7, "outer_momentum": 0.9},
    ),
    "co2": Preset(
        "48 local steps, during which the models of the 48 before are averaged; an outer step with momentum",
        "CO2: Efficient Distributed Training with Full Communication-Computation Overlap, Sun et al., 2024",
        {**EVERYTHING, "local_steps": 48, "staleness": 1, "outer_momentum": 0.5},
    ),
    "streaming-diloco": Preset(
        "DiLoCo with a tenth of the layers at a time, in 4 bits, overlapped: each layer once in 100 steps",
        "Streaming DiLoCo with overlapping communication, Douillard et al., 2025",
        {
            "sample_kind": "fragment",
            "random_ratio": 0.1,
            "topk_ratio": 1.0,
            "quant_bits": 4,
            "auto": (),
            "local_steps": 10,
            "staleness": 1,
            "outer_learning_rate": 0.4,
            "outer_momentum": 0.9,
        },
    ),
    "sparseloco": Preset(
        "30 local steps, then the top 64 of each 4,096 values in 2 bits; the residual decays, as a momentum",
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
    "dgc": Preset(
        "the largest thousandth each step, momentum masked where it was sent, after 100 steps of 16 bits",
        "Deep Gradient Compression, Lin et al., 2017 (ICLR 2018)",
        {**FRESH, "topk_ratio": 0.001, "momentum_masking": True, "uncompressed_steps": 100},
    ),
    "onebit": Preset(
        "everything each step in 1 bit, error feedback on both sides, after 100 steps of 16 bits",
        "1-Bit Stochastic Gradient Descent, Seide et al., 2014; 1-bit Adam, Tang et al., 2021",
        {**FRESH, "quant_bits": 1, "uncompressed_steps": 100},
    ),
    "lora-cocktail": Preset(
        "adapters are small: all of them each step, in 4 bits as far as the line allows",
        "CocktailSGD, as above; LoRA: Low-Rank Adaptation of Large Language Models, Hu et al., 2021",
        {**OWN_K, **DENSE},
    ),
}


def keys_of(name: object, adapters: bool) -> Mapping[str, Any]:
    """Return the keys that a preset sets, in a run of adapters or of whole models."""
    preset = PRESETS.get(str(name or DEFAULT))
    if preset is None:
        return {}
    return {**preset.keys, **preset.adapters} if adapters else preset.keys


def with_preset(written: Mapping[str, Any], adapters: bool) -> dict[str, Any]:
    """Complete a `compression` section by its preset; `auto` becomes the keys that the run chooses."""
    keys = keys_of(written.get("preset"), adapters)
    auto = written.get("auto", True)
    if isinstance(auto, bool):
        free = keys.get("auto", [one for one in CHOSEN if one not in keys])
        auto = [one for one in free if auto and one not in written]
    return {**keys, **written, "auto": auto}
