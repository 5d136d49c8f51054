"""Write a model folder through transformers: the reference that snapshots are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from recipes.errors import ModelError
from recipes.models import load_model, open_tokenizer
from recipes.training import FlatParameters
from recipes.weight_files import Layout, atomic_folder, layout_of, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export(
    folder: Path,
    base_folder: Path,
    vector: Tensor,  # (P,) float32
    layout: Layout,
    tokenizer: PreTrainedTokenizerBase | None = None,  # None: the base folder's
) -> Path:
    """Write the base with `vector` as its parameters, and its tokenizer: a folder for `from_pretrained`.

    `folder` is replaced atomically. Weights are FP32 whatever the base's dtype, so the loss of the folder is
    the loss of the vector. Errors: ModelError where `layout` is not the base's.
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
