"""A recipe whose model and data on the hub are named by commit.

So all peers and every resumption mean the same ones, whatever becomes of the branch or tag that was written.
"""

from __future__ import annotations

from pathlib import Path

from recipes.config import Dataset, Recipe, on_hub
from recipes.downloads import commit_of_data

from .base_model import commit_of


def pinned(recipe: Recipe, base: Path) -> Recipe:
    """`recipe`, of which `base` is the model. What is not on the hub has no revision, and stays as it is.

    Errors: DataError.
    """
    model = recipe.model
    if not Path(model.model_name_or_path).expanduser().is_dir() and (commit := commit_of(base)) is not None:
        model = model.model_copy(update={"model_revision": commit})
    found = {
        "model": model,
        "datasets": tuple(map(pinned_data, recipe.datasets)),
        "eval_datasets": tuple(map(pinned_data, recipe.eval_datasets)),
    }
    return recipe.model_copy(update=found)


def pinned_data(dataset: Dataset) -> Dataset:
    if not on_hub(dataset.path) or (commit := commit_of_data(dataset.path, dataset.revision)) is None:
        return dataset
    return dataset.model_copy(update={"revision": commit})
