"""Yardsticks for a packet: heavy-tailed data, and the entropy of a distribution."""

from __future__ import annotations

import math

import numpy as np
import torch

from .codec import Cocktail

SEED = 2026


def heavy_tailed_models(n: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Make a local and a global model, (n,) each, whose difference is Student-t with 4 degrees of freedom, of
    the size of a learning rate."""
    generator = torch.Generator(device).manual_seed(SEED)
    delta = torch.randn(n, generator=generator, device=device).mul_(1e-4)
    # t(4) = normal / sqrt(chi-square(4) / 4); in windows, to save memory
    for start in range(0, n, 1 << 22):
        window = delta[start : start + (1 << 22)]
        uniform = torch.rand(2, len(window), generator=generator, device=device)
        window /= uniform.clamp_(min=1e-12).log_().sum(0).mul_(-0.5).sqrt_()
    global_model = torch.randn(n, generator=generator, device=device).mul_(0.02)
    return delta.add_(global_model), global_model


def heavy_tailed_packet(cocktail: Cocktail, n: int, seed: int, round: int = 0) -> bytes:
    """Encode the difference of two heavy-tailed models of n parameters, as a peer would."""
    local_model, global_model = heavy_tailed_models(n)
    sample = cocktail.draw(n, seed, round)
    return cocktail.encode(sample.difference(local_model, global_model)).packet


def entropy(shares: np.ndarray) -> float:
    """Return the bits of one symbol drawn with these probabilities."""
    return -sum(p * math.log2(p) for p in map(float, shares) if p > 0)
