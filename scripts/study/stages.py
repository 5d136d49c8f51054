"""Quantised activations between pipeline stages (AQ-SGD): their cost in held-out loss, and their bits.

    scripts/start scripts.study.stages --bits 4 --gradient-bits 8 --seeds 1 2 3
    scripts/start scripts.study.stages --bits 32 --gradient-bits 32 --seeds 1 2 3       nothing is quantised

The model, texts and base are the quality study's. A ring of real stages, codecs and messages trains on all
windows of the text, in another order in each epoch, as AQ-SGD remembers a sample from one epoch to the next.
A row is a line of JSON in --out, and replaces the older one of its setting and seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from recipes.config.schema import Training
from recipes.data import Sample
from recipes.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from scripts.report import rows
from scripts.study.train import Size, base, documentation, loss_at, new_model
from scripts.swarms.lab import parser
from scripts.swarms.stage_ring import LineSetting, StageRing

MICRO_BATCHES = 2  # of a step
IN_FLIGHT = 2


def batches(windows: torch.Tensor, size: Size, epochs: int, seed: int) -> Iterator[list[list[Sample]]]:
    """The micro-batches of each step: all windows once an epoch, in an order of its own."""
    trained = np.arange(size.length) > 0
    samples = [Sample(row.numpy().astype(np.int32), trained) for row in windows]
    each = size.rows // MICRO_BATCHES
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(samples), generator=generator).tolist()
        for first in range(0, len(order) - size.rows + 1, size.rows):
            taken = [samples[number] for number in order[first : first + size.rows]]
            yield [taken[at : at + each] for at in range(0, size.rows, each)]


def cell(
    size: Size, setting: LineSetting, stages: int, asked: tuple[int, float, int], folder: Path
) -> rows.Row:
    """One training run: `asked` are epochs, learning rate and seed."""
    torch.set_num_threads(1)
    epochs, rate, seed = asked
    text, held = documentation(size.length)
    start, flat = base(size, folder), new_model(size)
    flat.take(start)
    windows, held_rows = text.all(), held.all()
    ring = StageRing(flat.model, stages, setting)
    parameters = ring.parameters()
    steps = epochs * (len(windows) // size.rows)
    training = Training(learning_rate=rate, seed=seed, max_steps=steps, adam_beta1=0.9, adam_beta2=0.99)
    optimizer, schedule = build_optimizer([*parameters.values()], training), learning_rate(training, steps)
    by_epoch, curve = list[float](), list[float]()
    values = (steps // epochs) * size.rows * size.length * size.hidden * stages  # on all lines, an epoch
    began, sent = time.process_time(), dict(ring.sent)
    for step, micro_batches in enumerate(batches(windows, size, epochs, seed)):
        optimizer.zero_grad()
        terms = sum(sample.count for part in micro_batches for sample in part)
        ring.gradient(micro_batches, terms, IN_FLIGHT)
        torch.nn.utils.clip_grad_norm_(parameters.values(), training.max_grad_norm)
        set_learning_rate(optimizer, schedule(step))
        optimizer.step()
        if (step + 1) % (steps // epochs) == 0:
            by_epoch.append(round(8 * (ring.sent["activations"] - sent["activations"]) / values, 4))
            sent = dict(ring.sent)
            found = {name: parameter.detach() for name, parameter in parameters.items()}
            vector = torch.cat([found[name].reshape(-1) for name in flat.layout.names])
            curve.append(round(loss_at(flat, vector, held_rows), 5))
    return {
        "bits": setting.bits,
        "gradient_bits": setting.gradient_bits,
        "stages": stages,
        "seed": seed,
        "rate": rate,
        "steps": steps,
        "loss": curve,  # held-out, after each epoch
        "forward": by_epoch,  # bits a value with all headers, by epoch
        "back": round(8 * ring.sent["gradients"] / (values * epochs), 4),
        "resent": ring.sent["mismatch"],
        "seconds": round(time.process_time() - began),
    }


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8, 32))
    asked.add_argument("--gradient-bits", type=int, default=8, choices=(4, 8, 32))
    asked.add_argument("--stages", type=int, default=2)
    asked.add_argument("--epochs", type=int, default=4)
    asked.add_argument("--rate", type=float, default=4e-3)
    asked.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    asked.add_argument("--base", type=Path, default=Path("outputs/quality"), help="folder of the base model")
    asked.add_argument("--out", type=Path, default=rows.FOLDER / "stages.jsonl")
    given = asked.parse_args()
    size = Size()
    windows = len(documentation(size.length)[0].all())
    setting = LineSetting(given.bits, given.gradient_bits, windows, size.length)
    for seed in given.seeds:
        found = cell(size, setting, given.stages, (given.epochs, given.rate, seed), given.base)
        rows.keep(given.out, found, ("bits", "gradient_bits", "stages", "seed", "rate", "steps"))
        print(found, flush=True)


if __name__ == "__main__":
    main()
