"""The head of a ring: a volunteer's session is built on all its machines, and joins anew after a loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from cocktail_cli.assembly import Joining
from cocktail_cli.ui import Progressed
from recipes.config import Recipe
from recipes.training import Peer
from transport import PeerLink

from .compute import RingHead, StageLost, StageMachine, build_staged_peer, load_replica, mend
from .lines import StageLink

PATIENCE = 600.0  # seconds for the other machines to be there
AGAIN_S = 0.05  # between two tries
DISSOLVED = "the hub has dissolved this ring, or given this machine's place in it to another"


class RingDissolved(Exception):
    """The hub has dissolved the ring, or given this machine's place to another: it waits for a new one."""


class StageRing(Joining):
    """The ring of a head, which lasts longer than a session.

    Args:
        layers: by stage, as a hub divides them.
    """

    keeps = False

    def __init__(self, lines: StageLink, device: str, layers: tuple[range, ...]) -> None:
        self.lines = lines
        self.head = RingHead(StageMachine(0, device), lines, layers)
        self.show: Callable[[Any], None] = lambda event: None
        self._peer: Peer | None = None  # of an earlier session
        self._dissolved = False

    def dissolve(self) -> None:
        """End the ring, from any thread: the session under way loses it, and `check_ring` raises from now
        on."""
        self._dissolved = True
        self.head.lose(StageLost(DISSOLVED))

    def check_ring(self) -> None:
        """Raise RingDissolved after `dissolve`."""
        if self._dissolved:
            raise RingDissolved(DISSOLVED)

    def wait(self, show: Callable[[Any], None]) -> None:
        """Raise RingDissolved where no session can follow."""
        self.check_ring()

    def builder(self, link: PeerLink, leave: Callable[[str], None], vram_limit: int | None) -> RingBuilder:
        self.lines.rate_limits = link.rate_limits
        return RingBuilder(self, link)

    def peer(
        self, load: Callable[[RingHead], bool], micro_batch: int, go_on: Callable[[], None] = lambda: None
    ) -> Peer:
        """Load all machines once they are there, or those that lack their part; return the peer that they
        are, that of the session before where the head has kept its part.

        Raises StageLost, StageFailed, ModelError, and what `go_on` raises.
        """
        until = time.monotonic() + PATIENCE
        while True:
            go_on()
            if self._dissolved:
                raise StageLost(DISSOLVED)
            self.head.mend()
            try:
                if load(self.head) and self._peer is not None:
                    mend(self._peer)
                else:
                    self._peer = build_staged_peer(self.head, micro_batch)
                return self._peer
            except StageLost:  # one that is started only now, or again
                if time.monotonic() > until:
                    raise
            time.sleep(AGAIN_S)


class RingBuilder:
    """Builds the peer of a head's session, on the machines of its ring."""

    pids: ClassVar[set[int]] = set()

    def __init__(self, ring: StageRing, link: PeerLink) -> None:
        self.ring, self.link = ring, link

    def build(self, recipe: Recipe, base: Path, snapshot: Path | None, micro_batch: int, round: int) -> Peer:
        stages, source = self.ring.head.stages, (recipe, base, snapshot, self.link.name, round)
        said = f"waiting for the other {stages - 1} of {stages} machines, then giving each its layers"
        self.ring.show(Progressed(said))
        return self.ring.peer(
            lambda head: load_replica(head, *source), micro_batch, self.link.raise_if_leaving
        )

    def check(self) -> None:
        """Pass: a lost machine ends the session by itself."""

    def close(self) -> None:
        """Pass: the ring is there for the next session."""
