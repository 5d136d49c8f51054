"""Requests of a replica's first stage, its head, to all its stages: each goes once around the ring.

    head -> stage 1 -> ... -> stage S - 1 -> head

Each stage does what is asked, puts its answer behind those before it, and its bytes into the place of those
that were for it. So a request needs no line but the activations', arrives in order with them, and comes back
when all have answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from cocktail_cli.errors import Failure
from compress import PacketError
from recipes.errors import ModelError, PartLost
from transport.protocol import ProtocolError, read_msgpack

from ..lines import FORWARD, StageMessage

FAILED = "failed"  # a request that nobody made: a stage tells the head what it met
UNASKED = 0  # number of that

COUNT = range(-1, 1 << 53)
STATE: Mapping[str, type | range] = {"round": COUNT, "fingerprint": range(1 << 64), "shards": list}
SAYS: Mapping[str, Mapping[str, type | range]] = {  # what the answers to requests say
    "held": {"key": str, "round": COUNT, "step": COUNT},
    "load": {"parameters": list},
    **dict.fromkeys(("begin", "state", "settle", "catch_up", "move"), STATE),
    "encode": {"usual": COUNT, "short": bool},
    "square": {"square": float, "noise": dict},
    "distance": {"square": float},
}

BESIDE = ("encode", "decode", "move")  # requests that run beside the compute; see StagePart for all
BRINGS = ("fill", "decode", "catch_up")  # requests that have bytes for each stage


class StageLost(PartLost):
    """A machine of a replica is gone, or was started again: what it had of x_i is lost."""


class StageFailed(Failure):
    """A machine of a replica met an error of its own, or sends what no stage does.

    Args:
        stage: number of that machine.
    """

    def __init__(self, message: str, stage: int) -> None:
        hints = ("the output of that machine says more; start it again",)
        super().__init__("rank_lost", f"stage {stage}: {message}", hints=hints)
        self.stage = stage


class StageFull(MemoryError):
    """A machine of a replica has no memory left.

    Args:
        stage: number of that machine.
    """

    def __init__(self, message: str, stage: int) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class Answer:
    """The answer of one stage."""

    values: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""


class RingRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request on its way around the ring, and on the wire, where the message has its number."""

    do: str
    fields: dict[str, Any]
    data: tuple[bytes, ...]  # of stages 1 .. S - 1: for those that have not answered, from those that have
    answers: tuple[dict[str, Any], ...] = ()
    number: int = 0

    @property
    def failed(self) -> bool:
        return any("error" in answer for answer in self.answers)

    @property
    def mine(self) -> bytes:
        """Return the bytes for the stage that is next to answer."""
        return self.data[len(self.answers)]

    def answered(self, answer: Answer) -> RingRequest:
        """Add the answer of the stage whose turn it is."""
        at = len(self.answers)
        data = (*self.data[:at], answer.data, *self.data[at + 1 :])
        return structs.replace(self, answers=(*self.answers, dict(answer.values)), data=data)

    def message(self) -> StageMessage:
        return StageMessage(
            self.number, "request", 0, msgspec.msgpack.encode(structs.replace(self, number=0))
        )


def sender(number: int, kind: str, stages: int) -> int:
    """Return the stage of so many that sends stage `number` its messages of this kind."""
    return (number + (-1 if kind in FORWARD else 1)) % stages


def request_of(message: StageMessage) -> RingRequest:
    """Read a request. Errors: PacketError."""
    size = len(message.body)
    try:
        found = read_msgpack(message.body, RingRequest, f"a request of {size:,} bytes")
    except ProtocolError as error:
        raise PacketError(str(error)) from None
    if len(found.answers) > len(found.data):
        raise PacketError(f"a request of {size:,} bytes has more answers than stages")
    return structs.replace(found, number=message.step)


def error_values(error: BaseException, full: bool) -> dict[str, Any]:
    """Describe an error of a stage for the head.

    Args:
        full: memory ran out.
    """
    kind = "ModelError" if isinstance(error, ModelError) else type(error).__name__
    text = (str(error).splitlines() or [""])[0][:200]
    return {"error": "memory" if full else kind, "message": text}


def raise_error(stage: int, values: Mapping[str, Any]) -> None:
    """Raise what a stage met: StageFull, ModelError or StageLost; else StageFailed."""
    kind, message = values.get("error"), str(values.get("message", ""))
    said = f"stage {stage}: {message}"
    if kind == "memory":
        raise StageFull(said, stage)
    if kind == "StageLost":
        raise StageLost(said)
    if kind == "ModelError":
        raise ModelError(said)
    raise StageFailed(f"{message} ({kind})", stage)


def answers_of(request: RingRequest, do: str, stages: int) -> list[Answer]:
    """Return the answers of stages 1 .. S - 1. Raises the first error among them; StageFailed where one is no
    answer to what was asked."""
    if not len(request.answers) == len(request.data) == stages - 1:
        raise StageFailed(f"brings {len(request.answers)} answers of {stages - 1}", stages - 1)
    for stage, values in enumerate(request.answers, 1):
        if "error" in values:
            raise_error(stage, values)
        for name, kind in SAYS.get(do, {}).items():
            met = values.get(name)
            fits = type(met) is int and met in kind if isinstance(kind, range) else type(met) is kind
            if not fits:
                raise StageFailed(f"answers {do} with {name} {str(met)[:40]!r}", stage)
    return list(map(Answer, request.answers, request.data))
