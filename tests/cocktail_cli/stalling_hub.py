"""A hub of a real run, in the test's own process, that stands still where a test wants it to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hub_swarm import HubSwarm

from cocktail_cli.host import RunDelegate, settings_of
from recipes.algorithm import compressor_of
from recipes.config import Recipe, load_recipe
from recipes.data import Corpus, build_corpus
from recipes.models import Base, load_tokenizer, prepare_base
from transport import Ledger
from transport.ledger import RoundRow
from transport.protocol import WeightedPacket

SMALL = ["data.max_length=32", "data.val_set_size=4", "global_batch_size=8", "max_steps=1000"]


@dataclass(frozen=True)
class Material:
    """Recipe, base model and corpus that the hubs of several runs share."""

    recipe: Recipe
    base: Base
    corpus: Corpus

    @classmethod
    def prepare(cls, folder: Path, *overrides: str) -> Material:
        recipe = load_recipe("smoke", [*SMALL, *overrides])
        base = prepare_base(recipe, folder)
        return cls(recipe, base, build_corpus(recipe, load_tokenizer(recipe.model, base.folder)))


class HeldWork(RunDelegate):
    """A delegate that commits nothing before `go` is set."""

    def __init__(self, material: Material, ledger: Path) -> None:
        super().__init__(material.recipe, material.base, material.corpus, ledger)
        self.go = threading.Event()

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        assert self.go.wait(120), "the test has forgotten its hub"
        return super().aggregate(round, updates)


@contextmanager
def stalling_hub(
    material: Material, folder: Path, *, rounds: int = 0, commits: bool = False, **settings: Any
) -> Iterator[HubSwarm]:
    """A hub on the loopback. `rounds`: so many are committed already; `commits`: it commits more."""
    work = HeldWork(material, folder)
    wanted = replace(settings_of(work, "test-run"), **settings)
    with Ledger(folder, run=wanted.run, samples=wanted.samples) as ledger:
        work.durable.recover(ledger)
        write_rounds(ledger, work, rounds)
    if commits:
        work.go.set()
    with closing(work.durable), HubSwarm(wanted, work, folder, 0) as running:
        try:
            yield running
        finally:
            running.hub.stop(now=True)
            work.go.set()


def write_rounds(ledger: Ledger, work: HeldWork, rounds: int) -> None:
    """Rounds as a peer alone would have made them, with noise for its updates."""
    mix, seed = compressor_of(work.recipe.compression), work.recipe.training.seed
    for round in range(rounds):
        noise = torch.randn(mix.draw(work.parameters, seed, round).m) * 1e-4
        packet = work.durable.aggregate(round, [WeightedPacket("ghost", mix.encode(noise).packet, 1.0)])
        ledger.commit(RoundRow(round, round, 0.0, 0.0, 0, ("ghost",), ("ghost",), None, 0), packet, ())
