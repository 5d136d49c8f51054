"""Adapters on private rows: the held-out loss of a run of four peers, without privacy and by epsilon.

scripts/start --test scripts.study.private_loops 8 2 --steps 60      epsilons

A small GPT-NeoX that knows Python's own source learns Python's documentation by LoRA of rank 4; each peer has
a quarter of that text for itself.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import cocktail_cli
from scripts import reach_tests
from scripts.study.train import Size, base, documentation, new_model

PEERS, BATCH, DELTA = 4, 48, 1e-4
SIZE = Size(hidden=48, length=64, base_steps=400)


def adapted(folder: Path) -> nn.Module:
    flat, start = new_model(SIZE), base(SIZE, folder)
    torch.nn.utils.vector_to_parameters(start, flat.model.parameters())
    torch.manual_seed(1)
    return get_peft_model(
        flat.model, LoraConfig(r=4, lora_alpha=8, target_modules=["query_key_value", "dense"])
    )


def loss_of(model: nn.Module, row: Tensor) -> Tensor:
    return model(input_ids=row[None], labels=row[None]).loss  # type: ignore[no-any-return]


def train(
    url: str, number: int, rows: Tensor, private: bool, folder: Path, found: dict[int, nn.Module]
) -> None:
    """Take part as one peer, with rows of its own."""
    model, name = adapted(folder), f"peer-{number}"
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1.0, weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(number)
    if private:
        own = cocktail_cli.PrivateRows(list(rows), loss_of, BATCH, at_once=64)
        with cocktail_cli.join_privately(url, model, optimizer, own, name=name) as swarm:
            while True:
                swarm.step()
    else:
        with cocktail_cli.join_with(url, model, optimizer, name=name) as swarm:
            while True:
                batch = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                swarm.step(loss, BATCH)
    found[number] = model


def cell(epsilon: float | None, args: Any) -> float:
    """Return the held-out loss of the run's result."""
    from own_host import hosted

    text, held = documentation(SIZE.length)
    parts, found = text.all().chunk(PEERS), dict[int, nn.Module]()
    training = {"max_steps": args.steps, "global_batch_size": PEERS * BATCH, "learning_rate": args.rate}
    sections = {"privacy": {"epsilon": epsilon, "delta": DELTA}} if epsilon else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        hosted(
            Path(folder), adapted(args.folder), {"first_peers": PEERS}, training=training, **sections
        ) as run,
    ):
        more = bool(epsilon), args.folder, found
        threads = [
            threading.Thread(target=train, args=(str(run.url), i, part, *more))
            for i, part in enumerate(parts)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    return float(held_out(found[0], held.all()))


@torch.no_grad()
def held_out(model: nn.Module, rows: Tensor) -> Tensor:
    return model.eval()(input_ids=rows, labels=rows).loss  # type: ignore[no-any-return]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("epsilons", nargs="+", type=float)
    asked.add_argument("--steps", type=int, default=60)
    asked.add_argument("--rate", type=float, default=5e-3)
    asked.add_argument("--folder", type=Path, default=Path("outputs/quality"), help="for the base")
    args = asked.parse_args()
    reach_tests("", "extensions/own_loop", "transport", "transport/hub")
    _, held = documentation(SIZE.length)
    print(f"base {float(held_out(adapted(args.folder), held.all())):.4f}", flush=True)
    for epsilon in (None, *args.epsilons):
        print(f"epsilon {epsilon or 'none'} {cell(epsilon, args):.4f}", flush=True)


if __name__ == "__main__":
    main()
