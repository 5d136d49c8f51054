"""Messages of those whom the run does not know yet, while rounds go on: read in turn, within a share of a
thread.

A newcomer is a connection without a session, or a session of which no update is in the run. To handle what
newcomers say takes at most SHARE of the I/O thread's time, measured by the clock on the wall: that is what
rounds lose. To read it costs time too, which no queue saves; so where all of them say more than TALK messages
in a second, whoever said most is hung up on, and whoever has more waiting than a line holds. Before a round
has known members nothing waits here. No clock.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from transport.protocol import messages
from transport.wire import FairQueue, Frames, TokenBucket

SHARE = 0.15  # of the thread's time
BURST_S = 0.002  # seconds of it at once
WAITING = 96  # messages of one newcomer: more than a congestion window has fragments
HELD = 48 << 20  # bytes in all
TALK = 1000  # messages in a second of all newcomers: what a line of 2 Gbit/s requests or brings
FEW = 32  # messages in a second for which nobody is hung up on

Payer = tuple[str, str]  # origin, and session or connection


class Waiting(NamedTuple):
    """A message that waits."""

    conn: bytes
    message: messages.ToHub
    payload: Frames  # none, or one
    size: int  # bytes
    origin: str
    payer: str  # session, or the connection


class NewcomerQueue:
    """The messages that wait."""

    def __init__(self) -> None:
        self._queue = FairQueue[Waiting]()
        self._held: Counter[Payer] = Counter()  # bytes
        self.waiting_bytes = 0  # of all of them
        self._said: Counter[Payer] = Counter()  # messages in this second
        self._talk = 0  # of all
        self._second = 0.0  # when it began
        self._share = TokenBucket(SHARE, BURST_S / SHARE)

    def put(self, message: Waiting, now: float) -> str | None:
        """Let a message wait. Returns the payer whose messages were dropped, as they are too many; else
        None."""
        if now >= self._second + 1.0:
            self._said.clear()
            self._talk = 0
            self._second = now
        payer = message.origin, message.payer
        self._said[payer] += 1
        self._talk += 1
        self._queue.put(*payer, message)
        self._held[payer] += message.size
        self.waiting_bytes += message.size
        loud: Payer | None = None
        if self._queue.waiting(*payer) > WAITING:
            loud = payer
        elif self.waiting_bytes > HELD:
            loud = most_of(self._held)
        elif self._talk > TALK and self._said[most := most_of(self._said)] > FEW:
            loud = most
        if loud is None:
            return None
        self.drop(*loud)
        return loud[1]

    def take(self) -> Waiting:
        """Pop the next message. Raises IndexError where there is none."""
        message = self._queue.take()
        self._less(message.origin, message.payer, message.size)
        return message

    def _less(self, origin: str, payer: str, size: int) -> None:
        self.waiting_bytes -= size
        self._held[origin, payer] -= size
        if not self._queue.waiting(origin, payer):
            del self._held[origin, payer]

    def drop(self, origin: str, payer: str) -> None:
        """Forget the messages of a newcomer."""
        self._queue.drop(origin, payer)
        self._talk -= self._said.pop((origin, payer), 0)
        if (origin, payer) in self._held:
            self._less(origin, payer, self._held[origin, payer])

    def took(self, seconds: float, now: float) -> None:
        """Charge the time that a message has taken."""
        self._share.take(seconds, now)

    def open_at(self, now: float) -> float:
        """Return from when on messages may be read beside the rounds."""
        return self._share.open_at(now)


def most_of(counted: Counter[Payer]) -> Payer:
    """Return who has most, at the origin that has most with all of its payers."""
    of_origin = Counter[str]()
    for (origin, _), count in counted.items():
        of_origin[origin] += count
    crowd = of_origin.most_common(1)[0][0]
    return max((payer for payer in counted if payer[0] == crowd), key=counted.__getitem__)
