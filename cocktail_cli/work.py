"""What the hub cannot know, put together from recipes: transport's `Work`, its settings, and x' as the
ledger has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.kept_owner import KeptOwner
from transport import Ledger, RunSettings
from transport.messages import File

if TYPE_CHECKING:
    from recipes.base import Base
    from recipes.cocktail_sgd import Common
    from recipes.data import Corpus
    from recipes.flat import Layout
    from recipes.schema import Recipe


class RunWork:
    """A run's corpus, its base model and the owner's half of Algorithm 1.

    Args:
        ledger: the folder of the run's ledger; `owner` keeps its error there, else it is only read here.
    """

    def __init__(self, recipe: Recipe, base: Base, corpus: Corpus, ledger: Path) -> None:
        from recipes.cocktail_sgd import Owner, mix_of
        from recipes.flat import layout_of
        from recipes.model import load_model

        self.recipe, self.base, self.corpus, self.ledger = recipe, base, corpus, ledger
        self.parameters = layout_of(load_model(base.folder)).size  # P
        owner = Owner(self.parameters, mix_of(recipe.compression), recipe.training.seed)
        self.owner = KeptOwner(owner, ledger)
        self.files = {f"base/{file.name}": base.folder / file.name for file in base.files}
        self.held_out = corpus.pack_held_out()

    def samples(self, ids: Sequence[int]) -> bytes:
        return self.corpus.pack(ids)

    def tokens(self, ids: Sequence[int]) -> int:
        return self.corpus.tokens(ids)

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        return self.owner.aggregate(round, updates)

    def committed(self, round: int, packet: bytes) -> None:
        """The owner's error moved with the aggregate already, and x' is folded from the ledger when asked
        for.
        """
        self.owner.committed(round)

    def fingerprint(self, round: int) -> int:
        return folded(self.recipe, self.base.folder, self.ledger, round).common.fingerprint

    def object(self, name: str) -> bytes | Path:
        return self.held_out if name == "eval" else self.files[name]


def settings_of(work: RunWork, run: str, first_peers: int = 1) -> RunSettings:
    """The run as its hub sees it. `first_peers`: how many start with it on this machine."""
    recipe = work.recipe
    swarm, steps = recipe.swarm, recipe.training.total_steps(len(work.corpus.samples))
    return RunSettings(
        run=run,
        recipe=recipe.to_json(),
        recipe_hash=recipe.recipe_hash,
        samples=len(work.corpus),
        global_batch=recipe.training.global_batch_size,
        base=tuple(File(file.name, file.size, file.sha256) for file in work.base.files),
        parameters=work.parameters,
        eval=bool(work.corpus.held_out),
        eval_every=recipe.checkpoint.eval_every(steps),
        min_peers=swarm.min_peers,
        first_peers=first_peers,
        max_peers=swarm.max_peers,
        start_timeout=swarm.start_timeout,
        step_timeout=swarm.step_timeout,
        peer_timeout=swarm.peer_timeout,
    )


@dataclass(frozen=True)
class Folded:
    """x' with the names of its parts."""

    common: Common
    layout: Layout


def folded(recipe: Recipe, base: Path, ledger: Path, stop: int | None = None) -> Folded:
    """x' after the committed rounds before `stop` (None: all): base weights plus packets, in order."""
    from recipes.cocktail_sgd import Common, fold, mix_of
    from recipes.flat import Flat
    from recipes.model import load_model

    flat = Flat(load_model(base))
    common = Common(flat.vector, mix_of(recipe.compression), recipe.training.seed)
    with Ledger(ledger, write=False) as reader:
        return Folded(fold(common, (packet for _, packet in reader.packets(0, stop))), flat.layout)
