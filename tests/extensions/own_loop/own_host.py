"""A hub of own loops in this process, over the loopback, and small models for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hub_swarm import HubSwarm
from torch import Tensor, nn

import cocktail_cli
from cocktail_cli.assembly import HostParts, hub_extensions, pinned, recipe_type
from cocktail_cli.host import CommittedModel, RunDelegate, settings_of
from recipes.config import Recipe
from recipes.models import prepare_base

EXACT = {"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32, "uncompressed_steps": 0}


def recipe_of(base: Path, **sections: dict[str, Any]) -> Recipe:
    """A small recipe of own loops; each keyword is a section, laid over these defaults."""
    usual: dict[str, dict[str, Any]] = {
        "training": {
            "global_batch_size": 16,
            "max_steps": 12,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "max_grad_norm": 0.0,
        },
        "swarm": {"step_timeout": 60.0, "peer_timeout": 60.0, "start_timeout": 200.0},
        "own_loop": {},
    }
    merged = {name: {**usual.get(name, {}), **sections.get(name, {})} for name in {*usual, *sections}}
    about = {"version": 1, "name": "test", "model": {"model_name_or_path": str(base)}}
    return recipe_type([*sections, "own_loop"]).model_validate({**about, **merged})


class Hosted(HubSwarm):
    """A run of a model that `save_base` writes."""

    def __init__(
        self, folder: Path, model: nn.Module, recipe: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        cocktail_cli.save_base(model, folder / "base")
        self.recipe = recipe_of(folder / "base", **recipe)
        base = prepare_base(self.recipe, folder / "unused")
        self.recipe = pinned(self.recipe, base.folder)
        corpus = self.recipe.objective.corpus(self.recipe)
        self.run_folder, self.base = folder, base
        work = RunDelegate(self.recipe, base, corpus, folder / "ledger")
        wanted = replace(settings_of(work, "test-run"), **{"linger_s": 0.5, "first_peers": 1} | settings)
        super().__init__(
            wanted,
            work,
            folder / "ledger",
            0,
            extend=lambda keys, ledger: hub_extensions(HostParts(self.recipe, keys, ledger, work)),
        )
        work.recover(self.ledger)

    def folded(self) -> Tensor:
        """x' as whoever only reads the ledger has it."""
        return CommittedModel(self.recipe, self.base.folder, self.run_folder).load().global_model.vector


@contextmanager
def hosted(
    folder: Path, model: nn.Module, settings: dict[str, Any] | None = None, **recipe: dict[str, Any]
) -> Iterator[Hosted]:
    """Host a run of `model`, until the block ends."""
    torch.set_num_threads(1)
    with Hosted(folder, model, recipe, settings or {}) as swarm:
        yield swarm
        swarm.work.close()


def conv_net(seed: int = 0) -> nn.Sequential:
    """A net that tells which quarter of an 8 x 8 image is bright."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, 4, (count,), generator=generator)
    pixels = 0.3 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        row, column = 4 * (label // 2), 4 * (label % 2)
        image[0, row : row + 4, column : column + 4] += 1
    return pixels, labels


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
