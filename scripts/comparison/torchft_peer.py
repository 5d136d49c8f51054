"""A peer of torchft, in an environment of its own: a replica group of one in each namespace of the lab.

    python -m scripts.comparison.torchft_peer ddp | diloco '{"rank": 0, "world": 4, "lighthouse": ...}'

ddp     torchft's DistributedDataParallel and Optimizer over ProcessGroupGloo
diloco  torchft's DiLoCo with SGD and Nesterov's momentum as the outer optimizer, as in its train_diloco.py

Both exchange FP32: torchft has no FP16 hook, and its 8-bit collectives are Triton's, for a GPU. A failed step
is said, and the manager goes on with the next; an exception that it raises ends the process. Phases and
steps are said as by gloo_peer.py. The `step` of a line is the manager's number, `tried` the one it began
with, `batches` how many batches of all peers are in the model by its count, and `group` the peers of a mean.
A peer that heals has another's gradient in its place: DiLoCo's then counts as its own (`replaced`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from scripts.comparison.gloo_peer import OUTER_MOMENTUM, OUTER_RATE
from scripts.comparison.work import LAST_BACKWARD, Work, bytes_sent, orders, sleep_until
from scripts.swarms.processes import say

PATIENCE_S = 3600.0
HEARTBEAT = timedelta(seconds=1)  # of 0.1 s by default, which would be 6 % of the slowest line here


class Replica:
    """A manager, with the store that its peers find each other's addresses in."""

    def __init__(self, kind: str, asked: dict[str, Any]) -> None:
        self.kind, own = kind, asked["own"]  # also its host name, which torchft gives to others
        timeout = timedelta(seconds=asked.get("timeout", PATIENCE_S))
        self.store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=asked["least"],
            use_async_quorum=kind == "ddp",
            timeout=timeout,
            quorum_timeout=max(timeout, timedelta(seconds=60)),
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self.store.port,
            lighthouse_addr=asked["lighthouse"],
            replica_id=f"replica{asked['rank']}",
            heartbeat_interval=HEARTBEAT,
            init_sync=False,  # all begin with the same weights; so none are sent
        )

    def train(self, work: Work, local: int) -> None:
        """Choose what is trained; once."""
        self.work = work
        if self.kind == "ddp":
            self.model = DistributedDataParallel(self.manager, work.model)
            self.optimizer = Optimizer(self.manager, work.optimizer)
        else:
            outer = {"lr": OUTER_RATE, "momentum": OUTER_MOMENTUM, "nesterov": True}
            optimizer = torch.optim.SGD(work.model.parameters(), **outer)
            DiLoCo(self.manager, [work.model], work.optimizer, optimizer, sync_every=local).__enter__()
        self.manager.register_state_dict_fn("default", self.load_state_dict, self.state_dict)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.work.model.state_dict(), "optimizer": self.work.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.work.model.load_state_dict(state["model"])
        self.work.optimizer.load_state_dict(state["optimizer"])

    def step(self) -> None:
        if self.kind == "ddp":
            self.synchronous()
        else:
            self.local()

    def synchronous(self) -> None:
        """Exchange the gradients while the last backward pass runs."""
        ends = time.monotonic() + self.work.seconds
        self.optimizer.zero_grad()  # asks the lighthouse for a quorum
        self.work.gradient(self.model, ends - LAST_BACKWARD * self.work.seconds)  # and all is exchanged
        sleep_until(ends)
        self.optimizer.step()  # where nothing has failed

    def local(self) -> None:
        self.work.gradient(self.work.model, time.monotonic() + self.work.seconds)
        self.work.step()  # each `local`-th exchanges


def attempt(replica: Replica, asked: dict[str, Any], local: int, index: int) -> None:
    """Make a step, and say what has come of it."""
    manager, sent = replica.manager, bytes_sent()
    before = manager.current_step()
    replica.step()
    sent, after = bytes_sent() - sent, manager.current_step()
    exchanges = replica.kind == "ddp" or (index + 1) % local == 0
    if exchanges and after == before:
        failed = manager.errored()
        error = failed.original_exception if failed else "there are too few peers"
        say("failed", step=before, error=str(error).splitlines()[0], group=manager.num_participants())
        return
    healed = after > before + 1  # its model is another's, and its own gradient is not in the mean
    if exchanges and not healed:
        say("averaged", step=after - 1, group=manager.num_participants())
    replica.work.save(asked.get("save"), asked["rank"], after - 1)
    batches = manager.batches_committed() * local
    found = {"batches": batches, "replaced": healed and replica.kind == "diloco"}
    say("step", step=after - 1, sent=sent, tried=before, healed=healed, **found)


def run(kind: str, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    replica = Replica(kind, asked)
    say("ready")
    work: Work | None = None
    index = 0
    for phase in orders():
        if work is None or work.width != phase["width"]:
            if work is not None:
                replica.manager.shutdown(wait=False)
                replica = Replica(kind, asked)
            work = Work(phase["width"], asked["rank"], phase.get("seconds"))
            replica.train(work, phase["local"])
            index = 0
        for _ in range(phase["steps"]):
            try:
                attempt(replica, asked, phase["local"] if kind == "diloco" else 1, index)
            except Exception as error:  # of a quorum, or of a heal: a replica ends then
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                say("failed", step=replica.manager.current_step(), error=said, ended=True)
                os._exit(1)
            index += 1
        say("over")


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
