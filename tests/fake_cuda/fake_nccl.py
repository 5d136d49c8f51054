"""Stands in for NCCL between the fake devices of two processes: gloo, through the memory of the host."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

raw: Any = torch._C._distributed_c10d


class HostGroup(dist.ProcessGroup):
    """The collectives that FSDP2 and a rank use; each is done when it returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.host = raw.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:
        return "nccl"

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        mine = [tensor.cpu() for tensor in tensors]
        self.host.allreduce(mine, opts or raw.AllreduceOptions()).wait()
        return done(tensors, mine)

    def _allgather_base(self, out: torch.Tensor, of: torch.Tensor, opts: Any = None) -> Any:
        found = torch.empty(out.shape, dtype=out.dtype)
        self.host._allgather_base(found, of.cpu(), opts or raw.AllgatherOptions()).wait()
        return done([out], [found])

    def _reduce_scatter_base(self, out: torch.Tensor, of: torch.Tensor, opts: Any = None) -> Any:
        found = torch.empty(out.shape, dtype=out.dtype)
        self.host._reduce_scatter_base(found, of.cpu(), opts or raw.ReduceScatterOptions()).wait()
        return done([out], [found])

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        mine = [tensor.cpu() for tensor in tensors]
        self.host.broadcast(mine, opts or raw.BroadcastOptions()).wait()
        return done(tensors, mine)

    def barrier(self, opts: Any = None) -> Any:
        self.host.barrier(opts or raw.BarrierOptions()).wait()
        return done([], [])


def done(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Any:
    """Bring the values to the device, and return a work that is done."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return raw._create_work_from_future(future)


def init_process_group(backend: str, **options: Any) -> None:
    initialize("fake_nccl" if backend == "nccl" else backend, **options)


dist.Backend.register_backend("fake_nccl", HostGroup, devices=["cuda"])
initialize = dist.init_process_group
dist.init_process_group = init_process_group  # type: ignore[assignment]
