"""Words of the diagnosis: the body of Report, a hub's figures, and the event that names a culprit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cocktail_cli.ui import events
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


@events.event
class Culprit(events.OfExtension):
    """A peer, or "the hub", lengthens rounds, and it is known why."""

    peer: str
    cause: str
    evidence: str  # what was measured
    remedy: str
    lengthened: messages.Finite  # what share longer the round was; 0: no longer (a clock that was set)
    round: messages.Count

    def sentence(self) -> str:
        return accusation(vars(self))


def accusation(told: Mapping[str, Any]) -> str:
    """Say who lengthens rounds, why, and what helps: the fields of a `Culprit`."""
    longer = f"makes rounds {told['lengthened']:.0%} longer: " if told["lengthened"] else ""
    return f"{told['peer']} {longer}{told['cause']}, {told['evidence']}. Remedy: {told['remedy']}"


class SlowestLine(msgspec.Struct, frozen=True):
    """A line, or the compute, that bounds the last rounds."""

    line: str  # "the hub's up", "the hub's down", "NAME's up", "NAME's down", "each peer's up", "the compute"
    waiting: messages.Finite  # share of a step that devices wait for the exchange
    bytes_per_s: messages.Finite  # that the line carries for one peer; 0: of the compute


@events.event
class NamedCulprit(Culprit):
    """A culprit in the status. `round` is the newest that shows it."""

    since: messages.Count  # the first


class Figures(msgspec.Struct):
    """Fields of a status."""

    bottleneck: SlowestLine | None = None
    culprits: list[NamedCulprit] = []
