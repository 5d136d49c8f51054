"""Results: samples of a run's models, and the finished one uploaded to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, ModelOnDisk, PagePart

if TYPE_CHECKING:
    from recipes.config import Recipe

NAME = "results"  # of its section


class Results(Extension):
    """Only the host writes samples and uploads, and only what the recipe asks for."""

    def check_host(self, recipe: Recipe) -> None:
        """Open the repository: a token that may not write is found before hours of training."""
        keys: Any = recipe.extensions[NAME]
        if keys.push_to_hub:
            keys.repository.open()

    def chosen(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have base and model answer two of the rows that are held out."""
        return {f"{NAME}.sample_prompts": 2} if "data.val_set_size" in keys else {}

    def model_here(self, work: Any, model: ModelOnDisk, options: Mapping[str, Any]) -> None:
        """Upload the run's own model; write samples of each, unless the host wants to end."""
        from .sample_writer import push, write_samples

        keys: Any = work.recipe.extensions[NAME]
        if keys.push_to_hub and model.folder == work.model.folder:
            push(keys.repository, work.recipe, model)
        if keys.sample_prompts and not model.stop():
            write_samples(keys.sample_prompts, work, model)

    def events(self) -> tuple[type[Any], ...]:
        from .events import Sample

        return (Sample,)

    def page(self) -> PagePart:
        from .events import SamplesOnPage

        return SamplesOnPage()


extension = Results()
