"""Recipe keys of runs whose peers bring their own training loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, Strict

from recipes.config import Conflict, ObjectiveSection, Real, Recipe, key

if TYPE_CHECKING:
    from recipes.data import Corpus
    from recipes.weight_files import StoredVector

    from .named_tensors import Brought

HELD_OUT = 64  # parts of an evaluation at most: each is a peer's own
EXCLUDED = {  # key -> the value that it must have: peers do that themselves
    "lora": None,
    "data.val_set_size": 0,
    "training.fp32_master_weights": True,
    "training.torch_compile": False,
    "compression.momentum_masking": False,
}


class Keys(ObjectiveSection):
    """Peers bring model, data, loss and loop of their own, and call `swarm.step`; the hub has x_0, as named
    tensors, and no data. A sample of the run is one that some peer has trained on."""

    term: ClassVar[str] = "sample"
    method: ClassVar[str] = "training in the peers' own loops"
    foreign_names: ClassVar[Mapping[str, str]] = {"own_loop.script": "train_script"}

    script: Annotated[str, Field(pattern="^https://")] | None = key(
        None, "https address of the program that peers start; the hub never sends it"
    )
    script_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = key(None, "its hash, in hex")
    loss_range: Annotated[tuple[Real, Real], Strict(False)] = key(
        (-1e4, 1e4), "a loss that a peer reports is dropped beyond it"
    )

    def described(self) -> Iterator[str]:
        program = f": {self.script}, sha256 `{self.script_sha256}`" if self.script else ""
        yield f"each peer trained on its own data in its own loop{program}"

    @property
    def invitation(self) -> str:
        if self.script is None:
            return "start your own loop: cocktail_cli.join_with(RUN_URL, model, optimizer)"
        return f"fetch {self.script} (sha256 {self.script_sha256}), read it, and start it with the run URL"

    def corpus(self, recipe: Recipe) -> Corpus:
        """Make a corpus whose samples stand for those of peers."""
        from .named_tensors import stand_ins

        return stand_ins(recipe, HELD_OUT if recipe.checkpoint.eval_steps else 0)

    def open_trained(self, folder: Path) -> StoredVector:
        from .named_tensors import open_named

        return open_named(folder)

    def objective(self) -> Brought:
        from .named_tensors import Brought

        return Brought((self.loss_range, (0.0, inf)))

    def conflicts(self, recipe: Recipe) -> Iterator[Conflict]:
        """Yield what the hub has no part in."""
        if recipe.datasets or recipe.eval_datasets:
            yield Conflict("datasets", "excluded by `own_loop:`: peers have their own data", "no data sets")
        if recipe.training.max_steps < 1:
            text = "is required by `own_loop:`: peers' data have no length that the hub knows"
            yield Conflict("training.max_steps", text, "max_steps=1000")
        if self.loss_range[0] >= self.loss_range[1]:
            yield Conflict("own_loop.loss_range", "must be the least loss, then the greatest")
        if (self.script is None) != (self.script_sha256 is None):
            yield Conflict("own_loop.script", "script and script_sha256 stand together")
        for name, wanted in EXCLUDED.items():
            value: object = recipe
            for part in name.split("."):
                value = getattr(value, part)
            if value != wanted:
                yield Conflict(name, "excluded by `own_loop:`: a peer's own program decides it")
