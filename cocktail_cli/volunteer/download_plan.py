"""The bytes that a joiner fetches before it can train, by the hub's welcome and this machine's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cocktail_cli.assembly import recipe_type

from .base_weights import base_folder, bytes_to_fetch, check_files, free_bytes, is_weights, snapshot_files

if TYPE_CHECKING:
    from transport.protocol import messages


class DownloadPlan:
    """The way to the global model with the fewest bytes.

    Args:
        max_disk: bytes that fetched models may take; None: no limit.
        kept: round of this machine's checkpoint in the run; None: there is none.
    """

    def __init__(self, welcome: messages.Welcome, max_disk: int | None, kept: int | None = None) -> None:
        from recipes.config import recipe_from_json
        from transport import CatchUp
        from transport.peer import LocalCopy

        self.recipe = recipe_from_json(welcome.recipe, recipe_type)
        check_files(welcome.base, self.recipe.model.trust_remote_code)
        self.files, self.folder = welcome.base, base_folder(welcome.base)
        self.frozen = self.recipe.lora is not None  # the base is then needed whatever way the model comes
        missing = bytes_to_fetch([file for file in self.files if is_weights(file)], self.folder)
        # A checkpoint is loaded into a model made from the base: without base weights it is no way by itself.
        own = LocalCopy(kept) if kept is not None and (self.frozen or not missing) else None
        self.machine = CatchUp(welcome, missing, own, free_bytes(max_disk), self.frozen)

    @property
    def bytes(self) -> int:
        """Bytes to fetch before this peer can train, as far as known."""
        return bytes_to_fetch(snapshot_files(self.files), self.folder) + self.machine.plan.bytes

    @property
    def bytes_here(self) -> int:
        """Bytes of the base model that are on the disk already."""
        return sum(file.size for file in self.files) - bytes_to_fetch(self.files, self.folder)

    @property
    def way(self) -> str:
        """The source of the global model, in a word for people."""
        return str(self.machine.plan.way.value)
