"""PowerSGD's cost in held-out loss: cells of the quality study (bench_quality), its model and tokens.

    scripts/rivals powersgd --ranks 1 4 --rates 2e-3 4e-3 8e-3 --seeds 1 --optim muon

Vogels et al., 2019, as torch's `powerSGD_hook` does it: gradients of matrices as P Q' of the rank given, Q
kept from step to step, what is left out kept by each worker; vectors as they are; all in FP32. Workers take
turns in one process, as the study's do; one step of the optimizer on the mean. The first two steps are dense.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from recipes.config.schema import Training
from recipes.training import build_optimizer, clip, embeddings_of, learning_rate, set_learning_rate
from scripts.report import rows
from scripts.study.train import ADAMW, Optim, Size, backward, base, documentation, loss_at, new_model
from scripts.swarms.lab import parser

WORKERS, DENSE = 4, 2
RATE = 2  # a matrix is not compressed where that would not make it so many times smaller


@dataclass
class Matrix:
    """One weight's gradient, over the workers."""

    q: Tensor  # (m, r), warm
    errors: list[Tensor] = field(default_factory=list)  # (n, m), of each worker

    def mean(self, gradients: list[Tensor]) -> Tensor:
        """(n, m): what all workers apply."""
        owed = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        p = torch.linalg.qr(torch.stack([m @ self.q for m in owed]).mean(0))[0]
        self.q = torch.stack([m.T @ p for m in owed]).mean(0)
        mean = p @ self.q.T
        self.errors = [m - mean for m in owed]
        return mean


def small(shape: torch.Size, rank: int) -> bool:
    return len(shape) < 2 or (shape[0] + shape[1]) * rank * RATE >= shape[0] * shape[1]


def cell(size: Size, rank: int, optim: Optim, rate: float, seed: int, folder: Path) -> rows.Row:
    """One training run."""
    torch.set_num_threads(1)
    text, held = documentation(size.length)
    start, flat = base(size, folder), new_model(size)
    flat.take(start)
    weights = [p for p in flat.model.parameters() if p.requires_grad]
    draws = torch.Generator().manual_seed(seed)
    matrices = {
        i: Matrix(torch.randn(p.shape[1], rank, generator=draws), [torch.zeros(p.shape)] * WORKERS)
        for i, p in enumerate(weights)
        if not small(p.shape, rank)
    }
    training = Training(learning_rate=rate, seed=seed, max_steps=size.steps, optim=optim)
    optimizer = build_optimizer(flat.masters, training, embeddings_of(flat.model))
    rate_at = learning_rate(training, size.steps)
    for step in range(size.steps):
        batch, found = text.rows(size.rows, seed, step), list[list[Tensor]]()
        for worker in range(WORKERS):
            backward(flat, batch[worker::WORKERS], 0.0)
            found.append([p.grad.clone() for p in weights if p.grad is not None])
        for i, gradient in enumerate(flat.layout.views(flat.grad)):
            each = [gradients[i] for gradients in found]
            mean = matrices[i].mean(each) if i in matrices and step >= DENSE else torch.stack(each).mean(0)
            gradient.copy_(mean)
        clip(flat.layout.views(flat.grad), training.max_grad_norm)
        set_learning_rate(optimizer, rate_at(step))
        optimizer.step()
    sent = sum(sum(p.shape) * rank if i in matrices else p.numel() for i, p in enumerate(weights))
    loss = loss_at(flat, flat.vector, held.all())
    return {"loss": loss, "ratio": 2 * start.numel() / (4 * sent)}


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    asked.add_argument("--optim", default=ADAMW, choices=get_args(Optim))
    asked.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3])
    asked.add_argument("--seeds", type=int, nargs="+", default=[1])
    asked.add_argument("--folder", type=Path, default=Path("outputs/quality"), help="for the base")
    asked.add_argument("--out", type=Path, default=rows.FOLDER / "powersgd.jsonl")
    args = asked.parse_args()
    size = Size()
    for seed, rank, rate in product(args.seeds, args.ranks, args.rates):
        key = {"size": size.name, "rank": rank, "optim": args.optim, "rate": rate, "seed": seed}
        if rows.there(args.out, key):
            continue
        ended = cell(size, rank, args.optim, rate, seed, args.folder)
        found = key | ended | {"date": time.strftime("%Y-%m-%d")}
        rows.keep(args.out, found, tuple(key))
        said = f"rank {rank}, {args.optim}, rate {rate:g}, seed {seed}"
        print(f"{said}: {found['loss']:.4f}, {found['ratio']:.1f}x", flush=True)


if __name__ == "__main__":
    main()
