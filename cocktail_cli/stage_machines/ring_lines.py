"""A machine's lines in its replica's ring, as `recipes.staged_peer` asks for them, and the head's ring."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cocktail_cli.machine import own_keys
from recipes.config import Recipe
from recipes.errors import StageLost
from recipes.pipeline import StageMessage
from recipes.staged_peer import LineLost, RingHead, StageMachine, load_replica
from transport.protocol import AddressInUse, ProtocolError, parse_address
from transport.stages import FromNeighbour, LineMessage, RingURL, StageLink
from transport.wire import RouterWire

LIMIT = 1 << 32  # bytes of a message: the packets of all machines, in rounds that send everything
PATIENCE = 600.0  # seconds for the other machines to be there
ANYWHERE = "0.0.0.0"


def ring_of(addresses: tuple[str, ...]) -> RingURL:
    """Make the ring whose head this machine is: the same at each start, so the others need no new URL."""
    secret = hashlib.sha256(b"cocktail ring " + own_keys().secret.encode()).hexdigest()[:32]
    return RingURL(secret, addresses)


class RingLines:
    """A machine's lines to its neighbours (a `StageLines`). Raises AddressInUse.

    Args:
        lost: told when a neighbour is gone.
    """

    def __init__(self, url: RingURL, lost: Callable[[str], None] = lambda why: None) -> None:
        self.url, self.lost = url, lost
        keys = url.keys(url.number)
        port = parse_address(url.address)[1] if url.address else 0
        link: StageLink | None = None  # until it is made, the wire's thread lets nobody in: they dial again
        try:
            wire = RouterWire(
                ANYWHERE, port, keys, 1, allowed=lambda key: link is not None and link.knows(key)
            )
        except AddressInUse as error:
            error.hints = (
                f"this machine of the ring may run here already; else give it another port than {port}",
            )
            raise
        self.link = link = StageLink(wire, keys, LIMIT)
        self._told = ""
        link.connect(url.neighbour(-1), url.neighbour(1), can_be_dialled=bool(url.address))

    def send(self, message: StageMessage) -> None:
        self.link.send(LineMessage(**vars(message)))

    def receive(self, timeout: float) -> StageMessage | LineLost | None:
        came = self.link.receive(timeout)
        if came is None:
            return None
        if isinstance(came.what, LineMessage):
            self._told = ""
            return StageMessage(**vars(came.what))
        lost = LineLost(said(came))
        if lost.why != self._told:  # of a ring of two, both lines are to the same machine
            self._told = lost.why
            self.lost(lost.why)
        return lost

    def close(self) -> None:
        self.link.close()


def said(news: FromNeighbour) -> str:
    """Say what became of a neighbour."""
    if isinstance(news.what, ProtocolError):
        return f"{news.neighbour.name} breaks the rules of its line: {news.what}"
    seconds = getattr(news.what, "seconds", None)
    silent = "was started again" if seconds is None else f"has been silent for {seconds:.0f} s"
    return f"{news.neighbour.name} {silent}"


class StageRing:
    """The ring of a head, which lasts longer than a session."""

    def __init__(self, url: RingURL, device: str) -> None:
        self.lines = RingLines(url)
        self.head = RingHead(StageMachine(0, device), self.lines, url.stages)

    def load(self, recipe: Recipe, base: Path, snapshot: Path | None, name: str, round: int) -> None:
        """Give every machine its stage, once all are there. Raises StageLost, StageFailed, ModelError."""
        until = time.monotonic() + PATIENCE
        while True:
            self.head.mend()
            try:
                load_replica(self.head, recipe, base, snapshot, name, round)
                return
            except StageLost:  # one that is started only now, or again
                if time.monotonic() > until:
                    raise

    def close(self) -> None:
        with suppress(RuntimeError):
            self.head.close()
        self.lines.close()
