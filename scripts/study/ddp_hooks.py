"""Compare communication hooks of torch's DistributedDataParallel: held-out loss, bytes, seconds a step.

    unshare -rn sh -c 'ip link set lo up; scripts/start scripts.study.ddp_hooks'

Four ranks on this machine, over gloo on a loopback of their own, train the quality study's model with AdamW.
Bytes are what that loopback carried, a rank and step: TCP's too. The first steps are dense with every hook.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # by DDP: once, before ranks are forked
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from cocktail_cli import CocktailState, cocktail_hook
from compress import Cocktail
from scripts.report import rows
from scripts.study.train import Size, base, documentation, loss_at, new_model
from scripts.swarms.lab import parser

DENSE, WORLD = 10, 4
Register = Callable[[DistributedDataParallel], object]


def power(rank: int) -> Register:
    state = {"matrix_approximation_rank": rank, "start_powerSGD_iter": DENSE}
    return lambda model: model.register_comm_hook(PowerSGDState(None, **state), powerSGD_hook)


def cocktail(p: float, keep: float, bits: int) -> Register:
    mix = Cocktail(random_ratio=p, topk_ratio=keep, quant_bits=bits)
    return lambda model: model.register_comm_hook(CocktailState(mix, dense_steps=DENSE), cocktail_hook)


HOOKS: dict[str, Register] = {
    "none": lambda model: None,
    "fp16_compress_hook": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "powerSGD_hook, rank 1": power(1),
    "powerSGD_hook, rank 4": power(4),
    "cocktail_hook, all in 4 bits": cocktail(1.0, 1.0, 4),
    "cocktail_hook, K=.2, 4 bits": cocktail(1.0, 0.2, 4),
    "cocktail_hook, K=.05, 2 bits": cocktail(1.0, 0.05, 2),
    "cocktail_hook, p=.25, K=.2, 4 bits": cocktail(0.25, 0.2, 4),
}


def carried() -> int:
    """Count the bytes that the loopback has carried."""
    lines = dict(line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return int(next(fields for name, fields in lines.items() if name.strip() == "lo").split()[0])


def rank_of(rank: int, register: Register, args: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(hours=1))
    size = Size(steps=args.steps)
    text, held = documentation(size.length)
    flat = new_model(size)
    flat.take(base(size, args.folder))
    model = DistributedDataParallel(flat.model)
    register(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    began, before = time.monotonic(), carried()
    for step in range(args.steps):
        if step == DENSE:
            dist.barrier()
            began, before = time.monotonic(), carried()
        ours = text.rows(size.rows, 1, step)[rank::WORLD]
        optimizer.zero_grad()
        model(input_ids=ours, labels=ours).loss.backward()
        optimizer.step()
        decay.step()
    dist.barrier()
    if rank == 0:
        each, sent = args.steps - DENSE, carried() - before
        seconds = (time.monotonic() - began) / each
        flat.vector.copy_(torch.nn.utils.parameters_to_vector(flat.model.parameters()).detach())
        loss = loss_at(flat, flat.vector, held.all())
        row = {"hook": args.name, "steps": args.steps, "rate": args.rate, "date": str(date.today())}
        row |= {"loss": loss, "bytes": sent / each / WORLD, "step_s": seconds}
        print(row, flush=True)
        rows.keep(args.out, row, ("hook", "steps", "rate"))
    dist.destroy_process_group()


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--steps", type=int, default=400)
    asked.add_argument("--rate", type=float, default=2e-3)
    asked.add_argument("--folder", type=Path, default=Path("outputs/quality"), help="for the base")
    asked.add_argument("--out", type=Path, default=rows.FOLDER / "ddp_hooks.jsonl")
    args = asked.parse_args()
    base(Size(), args.folder)
    for args.name, register in HOOKS.items():
        with tempfile.TemporaryDirectory() as folder:
            fork = multiprocessing.get_context("fork")
            ranks = [
                fork.Process(target=rank_of, args=(i, register, args, Path(folder))) for i in range(WORLD)
            ]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
            if any(one.exitcode for one in ranks):
                os._exit(1)


if __name__ == "__main__":
    main()
