"""A run of one peer without a network, for measuring: each update comes back as the aggregate."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from recipes.training import Delivery
    from transport.protocol import messages


@dataclass
class LoopbackLink:
    """Serves `rounds` rounds of one lease, as recipes.training's Link."""

    lease: bytes
    samples: int
    rounds: int
    local_steps: int = 1
    name: str = "ann"
    leaving: threading.Event = field(default_factory=threading.Event)
    ended: str | None = None
    fits: int = 0
    sent: dict[int, bytes] = field(default_factory=dict)  # packets in flight, by round
    room: int = 0
    done: int = 0

    def fetch(self, name: str) -> bytes:
        kind, _, number = name.partition("/")
        return self.sent.pop(int(number)) if kind == "packet" else self.lease

    def fetched(self, name: str) -> AbstractContextManager[BinaryIO]:
        return nullcontext(io.BytesIO(self.fetch(name)))

    def packets(self, start: int, stop: int) -> Iterator[bytes]:
        return iter(())

    def ready(self, round: int, fingerprint: int) -> None: ...

    def next_round(self) -> messages.Round | None:
        from transport.protocol import messages  # here: it brings in ZeroMQ

        if self.done == self.rounds:
            self.ended = "that was enough"
            return None
        number, self.done = self.done, self.done + 1
        every = self.local_steps
        return messages.Round(
            number, number * every, self.rounds * every, [self.name], self.samples, exchange=True
        )

    def exchange(self, packet: bytes, delivery: Delivery) -> messages.Committed:
        from transport.protocol import messages

        self.sent[delivery.round] = packet
        return messages.Committed(delivery.round, len(packet), "", [self.name])  # it comes back unchecked

    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None: ...

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        return None

    def abandon(self) -> None:
        self.ended = "it was abandoned"

    def leave(self, reason: str) -> None: ...
