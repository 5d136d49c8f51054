"""A peer on the fake device, and a hub for it alone: a model of a million parameters that costs nothing."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from test_loop import Bigram, FakeHub, OneRound, recipe
from torch import nn

import compress.fingerprint  # noqa: F401 - the front has a function of this name
from compress import topk, triton_kernels
from recipes.algorithm import Aggregator, compressor_of
from recipes.config import Recipe
from recipes.training import Peer, build_peer, finetune

fingerprint = sys.modules["compress.fingerprint"]
SIDE = 1536
P = SIDE * SIDE
BIG = {"random_ratio": 1.0, "topk_ratio": 0.2, "quant_bits": 4, "auto": False}

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "without masters": {"model": {"dtype": "bfloat16"}, "training": {"fp32_master_weights": False}},
}


class Table(Bigram):
    """The next token's scores are a row of a large table."""

    def __init__(self, side: int = SIDE) -> None:
        nn.Module.__init__(self)
        start = torch.randn(side, side, generator=torch.Generator().manual_seed(1))
        self.table = nn.Parameter(0.1 * start)
        self.micro_batches = 0


@dataclass
class Hub(FakeHub):
    """A link to nobody, for a table of any size."""

    side: int = SIDE

    def __post_init__(self) -> None:
        self.aggregator = Aggregator(
            self.side**2, compressor_of(self.recipe.compression), self.recipe.training.seed
        )


def recipe_of(
    training: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **compression: Any
) -> Recipe:
    plain = recipe(**{**BIG, **compression}).model_dump(exclude_unset=True)
    changed = {
        "training": {**plain["training"], "optim": "adamw_torch", **(training or {})},
        "model": {**plain["model"], **(model or {})},
    }
    return Recipe.model_validate({**plain, **changed})


def peer_on(device: str, wanted: Recipe, side: int = SIDE) -> Peer:
    return build_peer(Table(side), wanted, micro_batch=4, device=device)


def trained(device: str, rounds: int = 2, wanted: Recipe | None = None, side: int = SIDE) -> tuple[Peer, Hub]:
    """A peer after some rounds, asked to leave before the next, and its hub."""
    wanted = wanted or recipe_of()
    hub, peer = Hub(wanted, [OneRound(t, t) for t in range(rounds)], side=side), peer_on(device, wanted, side)
    list(finetune(hub, peer, now=0))
    hub.ended = None
    peer.undelivered.clear()  # as if one more round had taken the last step
    return peer, hub


def small_windows(monkeypatch: Any, elements: int) -> None:
    """Let long vectors be worked on so many elements at a time."""
    monkeypatch.setattr(fingerprint, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(fingerprint, "AT_ONCE", elements)
    monkeypatch.setattr("recipes.algorithm.worker.WINDOW", elements)
    monkeypatch.setattr("recipes.training.trainer.GRADIENT_CHUNK", elements)
    monkeypatch.setattr("recipes.planning.memory_plan.GRADIENT_CHUNK", elements)
    monkeypatch.setattr("recipes.algorithm.worker.WINDOW", elements)
    monkeypatch.setattr("recipes.algorithm.global_model.ON_GPU", max(elements, 1 << 14))


def small_samples(monkeypatch: Any) -> None:
    """Let a short vector be encoded and decoded like a long one, of which a small part is looked at first."""
    monkeypatch.setattr("compress.backends.WORTH", 1 << 14)
    monkeypatch.setattr(topk, "SAMPLED", 1 << 13)
    monkeypatch.setattr("compress.quantization.SEEN", 1 << 10)
    monkeypatch.setattr(triton_kernels, "SPARE", 1 << 8)
    monkeypatch.setattr(fingerprint, "AT_ONCE", 1 << 10)
    monkeypatch.setattr("recipes.planning.memory_plan.FINGERPRINT_AT_ONCE", 1 << 10)
