"""Folders of models with random weights, so that no measurement has to download one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts import ROOT


def save_random(folder: Path, config: str, device: str = "cpu", dtype: str = "float32", **fields: Any) -> int:
    """Save a model of this class of config, with the builtin tokenizer; returns the bytes of its weights."""
    import torch
    import transformers

    from recipes.models.base_model import quiet_transformers

    torch.manual_seed(0)
    with torch.device(device), quiet_transformers():
        made = getattr(transformers, config)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
        builtin = ROOT / "recipes" / "builtin" / "tiny-gpt-neox"
        transformers.AutoTokenizer.from_pretrained(builtin).save_pretrained(folder)
    return sum(p.nbytes for p in model.parameters())
