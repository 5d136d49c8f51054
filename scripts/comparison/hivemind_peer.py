"""A peer of hivemind 1.1, in an environment of its own: one in each namespace of the lab.

    python -m scripts.comparison.hivemind_peer fp16 | 8bit '{"rank": 0, "world": 4, "address": ...}'

DecentralizedAverager over the gradients, compressed as the kind says. What a step has found is averaged while
the next one computes, as hivemind.Optimizer does with `delay_grad_averaging`. Phases and steps are said as
by gloo_peer.py.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.compression import Float16Compression, Uniform8BitQuantization

from scripts.comparison.work import Work, bytes_sent, orders, sleep_until
from scripts.swarms.processes import say

MATCHMAKING_S = 15.0  # with 3 s, four peers on slow lines split into groups of two and three
KINDS = {"fp16": Float16Compression, "8bit": Uniform8BitQuantization}


class Averaged:
    """Gradients that are averaged one step late."""

    def __init__(self, kind: str, work: Work, dht: DHT, asked: dict[str, Any]) -> None:
        self.work = work
        self.late = [torch.zeros_like(p) for p in work.model.parameters()]
        self.under_way: Any = None
        self.averager = DecentralizedAverager(
            self.late,
            dht,
            start=True,
            prefix=f"width{work.width}",
            target_group_size=asked.get("group", asked["world"]),  # a group begins when all are there
            min_matchmaking_time=asked.get("matchmaking", MATCHMAKING_S),
            request_timeout=2.0,
            next_chunk_timeout=asked.get("chunk_s"),
            allreduce_timeout=asked.get("all_s"),
            compression=KINDS[kind](),
        )

    def step(self, number: int) -> None:
        ends = time.monotonic() + self.work.seconds
        self.work.gradient(self.work.model, ends)
        now = [gradient.clone() for gradient in self.work.gradients]
        sleep_until(ends)
        if self.under_way is not None:
            self.arrive(number)
        with self.averager.get_tensors() as shared:
            for mine, gradient in zip(shared, now, strict=True):
                mine.copy_(gradient)
        self.under_way = self.averager.step(wait=False)

    def arrive(self, number: int) -> None:
        """The mean of the step before: apply it."""
        try:
            group = self.under_way.result()
        except Exception as error:  # its Optimizer goes on with local gradients then
            say("failed", step=number, error=f"{type(error).__name__}: {error}")
            group = None
        with self.averager.get_tensors() as shared:
            for p, mean in zip(self.work.model.parameters(), shared, strict=True):
                p.grad = mean.clone()
        self.work.step()
        say("averaged", step=number, group=len(group or {}))


def run(kind: str, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    here = [f"/ip4/{asked['own']}/tcp/{29600 + asked['rank']}"]
    dht = DHT(start=True, host_maddrs=here, initial_peers=asked["peers"], use_ipfs=False)
    say("ready", maddrs=[str(address) for address in dht.get_visible_maddrs()])
    way: Averaged | None = None
    number = 0
    for phase in orders():
        if way is None or way.work.width != phase["width"]:
            if way is not None:
                way.averager.shutdown()
            work, number = Work(phase["width"], asked["rank"], phase.get("seconds")), 0
            way = Averaged(kind, work, dht, asked)
        for _ in range(phase["steps"]):
            sent = bytes_sent()
            way.step(number)
            way.work.save(asked.get("save"), asked["rank"], number)
            say("step", step=number, sent=bytes_sent() - sent)
            number += 1
        say("over")
    if way is not None:
        way.averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
