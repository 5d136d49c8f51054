"""Recipe keys of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from recipes.config import Conflict, ExtensionSection, Recipe, key

if TYPE_CHECKING:
    from recipes.downloads import Repository


class Keys(ExtensionSection):
    foreign_names: ClassVar[Mapping[str, str]] = {"results.hub_model_id": "push_to_hub_model_id"}
    gone_keys: ClassVar[Mapping[str, str]] = {
        "hub_strategy": "there is no such key: the model is pushed at the end (before: cocktail export "
        "--push)"
    }

    push_to_hub: bool = key(False, "push at the end, with this machine's token: HF_TOKEN or `hf auth login`")
    hub_model_id: str | None = key(None, "repository to push to: me/my-model")
    hub_private_repo: bool | None = key(None, "make a private repository; null: the account's default")
    sample_prompts: Annotated[int, Field(ge=0, le=16)] = key(
        0, "held-out texts that the host's model continues before the first step, at snapshots and at the end"
    )

    @property
    def repository(self) -> Repository:
        """The repository to push the model to."""
        from recipes.downloads import Repository

        return Repository(self.hub_model_id or "", self.hub_private_repo)

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield what these keys lack."""
        if self.sample_prompts and not recipe.has_eval:
            text = "there is no held-out text to continue"
            yield Conflict("results.sample_prompts", text, "data.val_set_size=0.05")
        if self.push_to_hub and not self.hub_model_id:
            yield Conflict("results.push_to_hub", "where to?", "hub_model_id: me/my-model")
