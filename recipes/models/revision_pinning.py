"""Pin the hub revisions of a recipe to commits, so that all peers and every resumption use the same files."""

from __future__ import annotations

from pathlib import Path

from recipes.config import Dataset, Recipe, is_hub_id
from recipes.downloads import dataset_commit

from .base_files import cached_commit


def pin_revisions(recipe: Recipe, base: Path) -> Recipe:
    """Pin the model, whose folder is `base`, and the data sets. Local ones have no revision and stay
    unchanged.

    Errors: DataError.
    """
    model = recipe.model
    local = Path(model.model_name_or_path).expanduser().is_dir()
    if not local and (commit := cached_commit(base)) is not None:
        model = model.model_copy(update={"model_revision": commit})
    found = {
        "model": model,
        "datasets": tuple(map(_pin_dataset, recipe.datasets)),
        "eval_datasets": tuple(map(_pin_dataset, recipe.eval_datasets)),
    }
    return recipe.model_copy(update=found)


def _pin_dataset(dataset: Dataset) -> Dataset:
    if not is_hub_id(dataset.path) or (commit := dataset_commit(dataset.path, dataset.revision)) is None:
        return dataset
    return dataset.model_copy(update={"revision": commit})
