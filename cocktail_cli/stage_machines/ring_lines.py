"""A machine's lines in its replica's ring, as `recipes.staged_peer` asks for them, and the head's ring."""

from __future__ import annotations

import time
from collections.abc import Callable

from recipes.errors import StageLost
from recipes.pipeline import StageMessage
from recipes.staged_peer import LineLost, RingHead, StageMachine, build_staged_peer, mend
from recipes.training import Peer
from transport.protocol import AddressInUse, CurveKeys, ProtocolError
from transport.stages import FromNeighbour, LineMessage, Neighbour, StageLink
from transport.wire import RouterWire

LIMIT = 1 << 32  # bytes of a message: the packets of all machines, in rounds that send everything
PATIENCE = 600.0  # seconds for the other machines to be there
AGAIN_S = 0.05  # between two tries
DISSOLVED = "the hub has dissolved this ring, or given this machine's place in it to another"
ANYWHERE = "0.0.0.0"


class RingDissolved(Exception):
    """The hub has dissolved the ring, or given this machine's place to another: it waits for a new one."""


class RingLines:
    """A machine's lines to its neighbours (a `StageLines`), once it is connected. Raises AddressInUse.

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
        self.link.send(LineMessage(**vars(message)))

    def receive(self, timeout: float) -> StageMessage | LineLost | None:
        came = self.link.receive(timeout)
        if came is None:
            return None
        if isinstance(came.what, LineMessage):
            self._told = ""
            return StageMessage(**vars(came.what))
        if isinstance(came.what, ProtocolError):
            self.refused(came.neighbour)
        lost = LineLost(said(came))
        if lost.why != self._told:  # of a ring of two, both lines are to the same machine
            self._told = lost.why
            self.lost(lost.why)
        return lost

    def refuse(self, kind: str, why: str) -> None:
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


class StageRing:
    """The ring of a head, which lasts longer than a session.

    Args:
        layers: by stage, as a hub divides them.
    """

    def __init__(self, lines: RingLines, device: str, layers: tuple[range, ...]) -> None:
        self.lines = lines
        self.head = RingHead(StageMachine(0, device), lines, layers)
        self._peer: Peer | None = None  # of an earlier session
        self._dissolved = False

    def dissolve(self) -> None:
        """End the ring, from any thread: the session under way loses it, and `check` raises from now on."""
        self._dissolved = True
        self.head.lose(StageLost(DISSOLVED))

    def check(self) -> None:
        """Raise RingDissolved after `dissolve`."""
        if self._dissolved:
            raise RingDissolved(DISSOLVED)

    def peer(
        self, load: Callable[[RingHead], bool], micro_batch: int, go_on: Callable[[], None] = lambda: None
    ) -> tuple[Peer, bool]:
        """Load all machines once they are there, or those that lack their part; return the peer that they
        are, and whether it is that of the session before.

        Raises StageLost, StageFailed, ModelError, and what `go_on` raises.
        """
        until = time.monotonic() + PATIENCE
        while True:
            go_on()
            if self._dissolved:
                raise StageLost(DISSOLVED)
            self.head.mend()
            try:
                kept = load(self.head) and self._peer is not None
                if self._peer is not None and kept:
                    mend(self._peer)
                else:
                    self._peer = build_staged_peer(self.head, micro_batch)
                return self._peer, kept
            except StageLost:  # one that is started only now, or again
                if time.monotonic() > until:
                    raise
            time.sleep(AGAIN_S)
