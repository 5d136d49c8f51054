"""The probe beside the hub (recipes/probe.py): a thread that holds x', judges rounds, and says whose packets
are refused or count for less.

    commit thread   aggregate: found? refused; doubted? weighed  ->  ledger  ->  committed(packet, updates)
    this thread     g at x'  ->  a round is committed: what its packets do along g  ->  x' moves on  ->  g ...

The hub waits for none of it: a round that is committed before a gradient is ready is judged by nobody, and
each gradient judges one round. What goes wrong here is a warning; the run goes on without the probe.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail_cli.errors import explain
from transport.membership import STRIKES

if TYPE_CHECKING:
    from recipes.training import Probe, UsefulnessScore

log = logging.getLogger(__name__)

ENDS_WITHIN = 10.0  # seconds for a forward and backward pass under way

Updates = Sequence[tuple[str, bytes, float]]


@dataclass(frozen=True)
class Committed:
    """One round: what goes to x', and what is judged of it, if anything."""

    packet: bytes
    updates: Updates = ()
    held: frozenset[str] = frozenset()  # whose packets were shortened


class Probing:
    """The thread.

    Args:
        load: makes the probe, at x' of the round the run goes on with; called in the thread.
        tell: (peer, message) for the owner.
    """

    def __init__(self, load: Callable[[], Probe], tell: Callable[[str, str], None]) -> None:
        self.load, self.tell = load, tell
        self.found: dict[str, str] = {}  # who hurts, and why
        self.refused = Counter[str]()  # packets of those
        self.weights: Mapping[str, float] = {}  # of those whose packets count for less
        self.doubted = set[str]()  # whom the owner was told of
        self.rounds: queue.SimpleQueue[Committed | None] = queue.SimpleQueue()
        self.ready = threading.Event()  # there is a gradient that has judged no round
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._guarded, name="probe", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def committed(self, packet: bytes, updates: Updates, held: frozenset[str] = frozenset()) -> None:
        """The next round is durable."""
        if self.thread.is_alive():
            self.rounds.put(Committed(packet, updates if self.ready.is_set() else (), held))

    def objection(self, peer: str) -> str:
        """Why this peer's packet is refused; empty: it is not. After three it is out, and the next one called
        so is somebody else.
        """
        why = self.found.get(peer, "")
        self.refused[peer] += bool(why)
        if self.refused[peer] == STRIKES:
            del self.found[peer], self.refused[peer]
        return why

    def weighed(self, updates: Updates) -> Updates:
        """As they are to be averaged."""
        return [(peer, packet, weight * self.weights.get(peer, 1.0)) for peer, packet, weight in updates]

    def close(self) -> None:
        self.stopped.set()
        self.rounds.put(None)
        if self.thread.ident is not None:
            self.thread.join(ENDS_WITHIN)

    # ---- in the thread -------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._work()
        except Exception as error:
            log.warning("the probe ended", exc_info=True)
            self.tell("", f"the run goes on without its probe: {explain(error).message}")

    def _work(self) -> None:
        from recipes.training import Evidence

        probe = self.load()
        evidence = Evidence(probe.fills)
        while not self.stopped.is_set():
            if self.rounds.empty() and not self.ready.is_set():
                probe.look(self.stopped.is_set)
                self.ready.set()
            round = self.rounds.get()
            if round is None:
                return
            if round.updates and self.ready.is_set():
                self.ready.clear()
                for verdict in evidence.add(probe.gains(round.updates), round.held):
                    self.found[verdict.peer] = verdict.why
                self._doubt(evidence.doubts)
            probe.global_model.apply(round.packet)

    def _doubt(self, doubts: Mapping[str, UsefulnessScore]) -> None:
        """Who counts for less from now on. The owner is told when it is less than half, once."""
        self.weights = {peer: doubt.weight for peer, doubt in doubts.items() if doubt.weight < 1}
        for peer in [p for p, weight in self.weights.items() if weight < 0.5 and p not in self.doubted]:
            self.doubted.add(peer)
            self.tell(peer, doubts[peer].why)
