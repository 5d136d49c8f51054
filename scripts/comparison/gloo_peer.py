"""A peer of a rival on torch.distributed (gloo): a process in each namespace of the lab.

    python -m scripts.comparison.gloo_peer fp32 | fp16 | powersgd | diloco '{"rank": 0, "world": 4, "address":
    ...}'

fp32      DistributedDataParallel as it comes
fp16      with its hook `fp16_compress_hook`
powersgd  with its hook `powerSGD_hook`, rank 1, error feedback and warm start; dense for its first two steps
diloco    local steps; then the mean of what all have moved, in FP16, through an outer Nesterov step

It is told phases (`width`, `steps`; `local`: of DiLoCo, steps between two exchanges) and says each step. An
error is said, and ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from scripts.comparison.work import LAST_BACKWARD, Work, bytes_sent, orders, sleep_until
from scripts.swarms.processes import say

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


class Synchronous:
    """DistributedDataParallel: a step is exchanged while its last backward pass runs."""

    def __init__(self, kind: str, work: Work) -> None:
        self.work = work
        # all begin with the same weights; so none are sent, which would take minutes on these lines
        # One bucket for PowerSGD: over gloo, what its hook starts for several ends up in any order.
        bucket = 1000 if kind == "powersgd" else None
        self.model = DistributedDataParallel(work.model, init_sync=False, bucket_cap_mb=bucket)
        if kind == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind == "powersgd":
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook)

    def step(self, number: int) -> None:
        ends = time.monotonic() + self.work.seconds
        self.work.gradient(self.model, ends - LAST_BACKWARD * self.work.seconds)  # and all is exchanged
        sleep_until(ends)
        self.work.step()


class LocalSteps:
    """DiLoCo: `local` steps of each one's own, then an outer one that all make together."""

    def __init__(self, work: Work, local: int) -> None:
        self.work, self.local = work, local
        self.common = self.flat().clone()
        self.momentum = torch.zeros_like(self.common)

    def flat(self) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(self.work.model.parameters()).detach()

    def step(self, number: int) -> None:
        self.work.gradient(self.work.model, time.monotonic() + self.work.seconds)
        self.work.step()
        if (number + 1) % self.local == 0:
            self.exchange()

    def exchange(self) -> None:
        moved = (self.common - self.flat()).half()
        dist.all_reduce(moved)
        self.momentum.mul_(OUTER_MOMENTUM).add_(moved.float() / dist.get_world_size())
        self.common -= OUTER_RATE * (moved.float() / dist.get_world_size() + OUTER_MOMENTUM * self.momentum)
        torch.nn.utils.vector_to_parameters(self.common.clone(), self.work.model.parameters())


def run(kind: str, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": asked["address"], "MASTER_PORT": "29500"}
    patience = timedelta(seconds=asked.get("timeout", 3600.0))
    dist.init_process_group("gloo", rank=asked["rank"], world_size=asked["world"], timeout=patience)
    say("ready")
    way: Synchronous | LocalSteps | None = None
    number = 0
    for phase in orders():
        if way is None or way.work.width != phase["width"]:
            work = Work(phase["width"], asked["rank"], phase.get("seconds"))
            way = LocalSteps(work, phase["local"]) if kind == "diloco" else Synchronous(kind, work)
            number = 0
        dist.barrier()
        for _ in range(phase["steps"]):
            sent = bytes_sent()
            try:
                way.step(number)
            except RuntimeError as error:
                say("failed", step=number, error=str(error).splitlines()[0])
                os._exit(1)  # what its threads hold is not waited for
            way.work.save(asked.get("save"), asked["rank"], number)
            say("step", step=number, sent=bytes_sent() - sent)
            number += 1
        say("over")


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
