"""Words between a machine that lends memory for layers and the hub."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transport.protocol import messages

from .lines import LineRates

NAME = "stages"


class RingMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One machine of a ring, and its layers first .. stop-1. Without a name it is lost, not replaced yet."""

    name: messages.Word
    key: messages.Word  # CURVE, base64url
    address: messages.Word  # of its stage link: "host:port", or "place:port/name"; empty: none
    first: messages.Count
    stop: messages.Count


class OtherMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine to which the line is to be measured."""

    key: messages.Word  # CURVE, base64url
    address: messages.Word  # of its stage link, which is to be dialled; empty: that one dials


class Placed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An Extension of the hub: a machine's place in a ring of one or more. Without a ring it waits."""

    ring: messages.Word
    number: messages.Count  # of its stage; 0: the head
    machines: Annotated[list[RingMachine], Meta(max_length=64)]  # by stage
    reason: messages.Line = ""  # why it waits
    # those that it is to dial and to answer Probed, and those that it is to answer; no others
    probe: Annotated[list[OtherMachine], Meta(max_length=64)] = []
    spare: bool = False  # it waits while there are rings: it may replace a lost machine at any time


class Probed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An Extension of a machine: how many seconds each address in Placed.probe took to accept a connection,
    below 0: it did not; and the rates of its line. Likewise the seconds of a neighbour, whenever the line to
    it is closed, made, or not to be had. The first one of a session, which may be empty, says that the
    machine is prepared."""

    seconds: Annotated[dict[messages.Word, messages.Finite], Meta(max_length=64)]
    rates: Annotated[dict[messages.Word, LineRates], Meta(max_length=64)] = {}


class Lends(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a machine's Hello, whose `address` is that of its stage link. Placed follows whenever its
    place or its ring changes."""

    memory: messages.Size  # bytes that it can have
    had: Placed | None = None  # its place at this run's hub before: a restarted one knows of no ring


class StageLayers(msgspec.Struct):
    """A machine of a ring, and its layers first .. stop-1."""

    name: str | None
    layers: tuple[messages.Count, messages.Count]


class Rings(msgspec.Struct):
    """Machines that lend memory."""

    rings: list[list[StageLayers]] = []
    waiting: list[str] = []


class StagesStatus(msgspec.Struct):
    """Fields of a hub's status."""

    stages: Rings | None = None


def packed(body: Any) -> bytes:
    """Write a body."""
    return msgspec.msgpack.encode(body)
