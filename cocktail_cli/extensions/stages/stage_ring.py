"""The head of a ring: a volunteer's session is built on all its machines, and joins anew where one is lost.

Values go around the ring window by window, those of a frozen base in its own dtype. A machine that has the
same base on its disk reads from there what is not of a snapshot.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from cocktail_cli.assembly import Joining
from cocktail_cli.ui import Progressed
from recipes.config import Recipe
from recipes.training import Peer
from transport import PeerLink

from .compute import (
    CONFIG,
    RingHead,
    StageFailed,
    StageLost,
    StageMachine,
    build_staged_peer,
    mend,
    open_weights,
)
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


def load_replica(
    ring: RingHead, recipe: Recipe, base: Path, snapshot: Path | None = None, name: str = "", round: int = 0
) -> bool:
    """Give every machine its stage of the model in `base`, at x' of `round`: of a snapshot, or x_0.

    Machines that have their part from this head, at that round or a later one, keep it; also
    those that have it from a head before, which is lost: updates that it had in flight count as taken.
    Returns whether the head kept its own: `mend` is to follow then.

    Errors: ModelError: the model cannot be cut so; StageLost, StageFailed.
    """
    held = [answer.values for answer in ring.held()]
    if not ring.key:
        ring.key = next((one["key"] for one in held if one["key"]), "")
        ring.steps = max(one["step"] for one in held)
    kept = [bool(ring.key) and one["key"] == ring.key and one["round"] >= round for one in held]
    if not any(kept):
        ring.key = secrets.token_hex(8)
    layers = {str(stage): (one.start, one.stop) for stage, one in enumerate(ring.layers) if not kept[stage]}
    config = (base / CONFIG).read_text(encoding="utf-8")
    source = {"base": base.name, "from_snapshot": snapshot is not None}
    answers = ring.ask("load", recipe=recipe.to_json(), config=config, layers=layers, source=source)
    with open_weights(recipe, base, snapshot) as reader:
        for stage, answer in enumerate(answers):
            for wanted in answer.values["parameters"]:
                if not reader.has(wanted):
                    raise StageFailed(f"wants {str(wanted)[:60]}, which the model does not have", stage)
                name, _, dtype = wanted
                for start, values in reader.windows(name, dtype):
                    data = [values if at == stage else b"" for at in range(ring.stages)]
                    ring.ask("fill", data, stage=stage, name=name, start=start)
    ring.ask("begin", name=name, round=round, step=ring.steps, key=ring.key)
    if any(kept) and not kept[0]:
        ring.ask("settle", taken=None)
    return kept[0]
