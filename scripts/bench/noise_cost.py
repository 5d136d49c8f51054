"""Measure the cost of a gradient's noise estimate, beside the step of the optimizer.

    scripts/start scripts.bench.noise_cost                     100 M parameters, and adapters on 30 layers

Both are timed in turns on the same vector, as for a peer with one sample: the
mean of their processor time, without the first steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean

import torch
from torch import nn

from recipes.config import Training
from recipes.training import GradientNoise, build_optimizer, positions_of
from recipes.training.gradient_noise import AT_FIRST
from recipes.weight_files import FlatParameters
from scripts.swarms.lab import parser

SHAPES = {
    "a model of 12 layers": [
        (50_304, 768),
        *[(2304, 768), (768, 768), (3072, 768), (768, 3072), (768,)] * 12,
    ],
    "adapters on 30 layers": [(16, 576), (576, 16)] * 210,
}


def timed(what: Callable[[], object]) -> float:
    begun = time.process_time()
    what()
    return time.process_time() - begun


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--rounds", type=int, default=80)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--optim", default="adamw_torch_fused")
    given = asked.parse_args()
    torch.set_num_threads(given.threads)
    for name, shapes in SHAPES.items():
        flat = FlatParameters(nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes]))
        flat.grad.normal_()
        optimizer = build_optimizer(flat.masters, Training(optim=given.optim))
        noise = GradientNoise(positions_of(flat.layout), 0.999)

        def measure(flat: FlatParameters = flat, noise: GradientNoise = noise) -> None:
            noise.begin(0.125)
            if noise.wanted:
                noise.take(flat.grad[noise.positions].float())
            noise.observe()
            noise.sums.norms(0.125)

        steps, measures = list[float](), list[float]()
        for _ in range(given.rounds):
            steps.append(timed(optimizer.step))
            measures.append(timed(measure))
        step, cost = mean(steps[AT_FIRST:]), mean(measures[AT_FIRST:])
        size = flat.layout.size / 1e6
        print(f"{name}, {size:.1f} M: step {1e3 * step:.2f} ms, noise {1e3 * cost:.3f} ms, {cost / step:.2%}")


if __name__ == "__main__":
    main()
