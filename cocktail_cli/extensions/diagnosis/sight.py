"""A peer that a round goes on without, as its hub sees it: by the bytes of its connections.

    stopped   nothing comes, and its machine acknowledges all that it is sent: its process says nothing
    up        part of a message is here, and more of it comes: its line up carries its update slowly
    down      what it is sent is acknowledged a little at a time, and nothing is on its way up
    dark      nothing comes, and nothing is acknowledged

A process without a core sends a message at its line's rate once it runs, so nothing is half here for long.
It also says something now and then, so SlowRounds asks for a silence of most of the time since the round was
opened before it calls a process stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.wire import Crossed

STOPPED_S, ANSWERS_S = 2.0, 0.8  # of silence, and how much later its machine has acknowledged a ping
MOVES_S = 1.5  # seconds; bytes that came or were acknowledged within them move
PACKET = 1400  # bytes; fewer are pings, whose acknowledgements may wait behind its update


@dataclass(frozen=True)
class Moving:
    """An object, or what a peer was sent, on its way."""

    seconds: float  # so far
    came: int  # bytes
    size: int = 0  # 0: not known


@dataclass(frozen=True)
class Sight:
    """A peer as the hub sees it now."""

    silent: float = 0.0  # seconds since something last came from it
    heard: float = 0.0  # when that was, in the hub's monotonic seconds
    stopped: bool = False
    dark: bool = False
    up: Moving | None = None
    down: Moving | None = None

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase of its round, or a counter of its machine, so far; 0: not seen."""
        if phase in ("silent", "stopped"):
            return self.silent if phase == "silent" or self.stopped else 0.0
        moving = {"upload": self.up, "download": self.down}.get(phase)
        return moving.seconds if moving is not None else 0.0

    @classmethod
    def of(cls, lines: Sequence[Crossed], said: float, update: Moving | None, now: float) -> Sight:
        """See a peer.

        Args:
            lines: its connections.
            said: when its last whole message came.
            update: its update on its way, of which whole chunks are counted; None: there is none.
        """
        heard = max([said, *(line.received_at for line in lines)])
        answered = max((line.acknowledged_at for line in lines), default=0.0)
        caught_up, silent = min((line.caught_up_at for line in lines), default=0.0), now - heard
        partly, owed = sum(line.partly for line in lines), [line for line in lines if line.unacknowledged]
        up = down = None
        if partly and update is not None and silent < MOVES_S:
            up = Moving(update.seconds, min(update.size, update.came + partly), update.size)
        elif not partly and now - answered < MOVES_S:
            slow = [line for line in owed if min(line.acknowledged, line.unacknowledged) >= PACKET]
            since = min((line.caught_up_at for line in slow), default=0.0)
            down = Moving(now - since, sum(line.acknowledged for line in slow)) if slow else None
        alone = all(line.is_peers for line in lines)  # what a relay acknowledges says nothing of the peer
        return cls(
            silent,
            heard,
            stopped=alone and silent >= STOPPED_S and min(answered, caught_up) >= heard + ANSWERS_S,
            dark=alone and bool(owed) and now - max(heard, answered) >= STOPPED_S,
            up=up,
            down=down,
        )
