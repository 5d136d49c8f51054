"""A machine's lines in its replica's ring, whose neighbours are told apart by what they send, and lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transport.protocol import AddressInUse, CurveKeys, ProtocolError
from transport.wire import RouterWire

from .stage_line import StageMessage
from .stage_link import FromNeighbour, Neighbour, StageLink

LIMIT = 1 << 32  # bytes of a message: the packets of all machines, in rounds that send everything
ANYWHERE = "0.0.0.0"


@dataclass(frozen=True)
class LineLost:
    """A neighbour is gone, or was started again."""

    why: str


class RingLines:
    """A machine's lines to its neighbours, once it is connected. Raises AddressInUse.

    Args:
        bind, port: where it listens; port 0: any free one.
        hub: key of a hub that may see whether this machine is reached.
    """

    def __init__(self, keys: CurveKeys, bind: str = ANYWHERE, port: int = 0, hub: str = "") -> None:
        self.lost: Callable[[str], None] = lambda why: None  # told when a neighbour is gone
        # told of a neighbour that breaks the rules, or sends what no stage would send
        self.refused: Callable[[Neighbour], None] = lambda neighbour: None
        link: StageLink | None = None  # until it is made, the wire's thread lets nobody in: they dial again

        def allowed(key: str) -> bool:
            return key == hub or (link is not None and link.knows(key))

        try:
            wire = RouterWire(bind, port, keys, 1, allowed=allowed)
        except AddressInUse as error:
            error.hints = (
                f"this machine of the ring may run here already; else give it another port than {port}",
            )
            raise
        self.link = link = StageLink(wire, keys, LIMIT)
        self._told = ""
        self._told_of = set[str]()  # keys of neighbours of which that was said

    def send(self, message: StageMessage) -> None:
        """Send activations and requests to the next stage, all else to the one before, from any thread. Does
        not wait."""
        self.link.send(message)

    def receive(self, timeout: float) -> StageMessage | LineLost | None:
        """Wait for what a neighbour sends, or becomes; None: nothing in so many seconds. For one thread."""
        came = self.link.receive(timeout)
        if came is None:
            return None
        if isinstance(came.what, StageMessage):
            self._told = ""
            return came.what
        if isinstance(came.what, ProtocolError):
            self.refused(came.neighbour)
        lost = LineLost(said(came))
        if lost.why != self._told:  # of a ring of two, both lines are to the same machine
            self._told = lost.why
            self.lost(lost.why)
        return lost

    def refuse(self, kind: str, why: str) -> None:
        """Note that a neighbour has sent a message of this kind, which no stage would send."""
        neighbour = self.link.sender(kind)
        if neighbour is not None and neighbour.key not in self._told_of:
            self._told_of.add(neighbour.key)
            self.lost(f"{neighbour.name} {why}")
            self.refused(neighbour)

    def close(self) -> None:
        self.link.close()


def said(news: FromNeighbour) -> str:
    """Say what became of a neighbour."""
    if isinstance(news.what, ProtocolError):
        return f"{news.neighbour.name} breaks the rules of its line: {news.what}"
    seconds = getattr(news.what, "seconds", None)
    silent = "begins anew" if seconds is None else f"has been silent for {seconds:.0f} s"
    return f"{news.neighbour.name} {silent}"
