"""A recipe whose model and data on the hub are named by commit.

So all peers and every resumption mean the same ones, whatever becomes of the branch or tag that was written.
"""

from __future__ import annotations

from pathlib import Path

from recipes.config import Dataset, Recipe, is_hub_id
from recipes.downloads import dataset_commit

from .base_model import cached_commit


def pin_revisions(recipe: Recipe, base: Path) -> Recipe:
    """`recipe`, of which `base` is the model. What is not on the hub has no revision, and stays as it is.

    Errors: DataError.
    """
    model = recipe.model
    if (
        not Path(model.model_name_or_path).expanduser().is_dir()
        and (commit := cached_commit(base)) is not None
    ):
        model = model.model_copy(update={"model_revision": commit})
    found = {
        "model": model,
        "datasets": tuple(map(pinned_data, recipe.datasets)),
        "eval_datasets": tuple(map(pinned_data, recipe.eval_datasets)),
    }
    return recipe.model_copy(update=found)


def pinned_data(dataset: Dataset) -> Dataset:
    if not is_hub_id(dataset.path) or (commit := dataset_commit(dataset.path, dataset.revision)) is None:
        return dataset
    return dataset.model_copy(update={"revision": commit})
