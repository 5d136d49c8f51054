"""The body of Report: how a peer has spent the time since its last one."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.protocol import ProtocolError, messages, read_msgpack

NAME = "diagnosis"
Millis = Annotated[int, Meta(ge=0, le=2**40)]


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds of a peer between two reports. Counters of the machine are 0 where its system does not
    tell. An array on the wire: fields are only appended.
    """

    cycle: Millis = 0  # since the report before; 0: there was none
    idle: Millis = 0  # it had done its part and waited for others
    lease: Millis = 0  # fetching the tokens of its lease
    encode: Millis = 0
    download: Millis = 0  # of the aggregate
    apply: Millis = 0  # optimizer and join
    disk: Millis = 0  # writing what it keeps
    cpu_wait: Millis = 0  # its busiest thread was ready to run, and other work had the cores
    gpu_wait: Millis = 0  # other programs used its GPU
    memory: Millis = 0  # tasks of its machine or container stood still for lack of memory, its own among them
    io: Millis = 0  # tasks stood still for the disk
    throttled: Millis = 0  # the GPU or the processor was slowed down for its heat or power
    stopped: Millis = 0  # this process did not run at all, and not for lack of memory
    slept: Millis = 0  # the machine was suspended
    clock: Annotated[int, Meta(ge=-(2**50), le=2**50)] = 0  # the wall clock was set, forward if positive
    resent: Annotated[int, Meta(ge=0, le=1000)] = 0  # of 1,000 TCP segments of this machine: sent again
    upload: Millis = 0  # of the update before
    faults: messages.Count = 0  # major page faults of its process: pages that had to be read from disk


def spent_of(report: messages.Report) -> Spent | None:
    """Read the body of a report; None: its peer does not measure, or sends another."""
    try:
        return read_msgpack(report.extra.get(NAME, b""), Spent, "what a peer has measured")
    except ProtocolError:
        return None
