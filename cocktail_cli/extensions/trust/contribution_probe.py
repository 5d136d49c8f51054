"""The thread of the contribution probe beside the hub: it judges rounds, and says whose packets are refused
or count for less (contribution_score.Probe).

    commit thread   aggregate: objection? refused; doubt? reweighted  ->  ledger  ->  committed(packet,
    updates) this thread     gradient g at x'  ->  a round is committed: its updates along g  ->  x' moves on
    ->  g ...

The hub never waits for it: a round committed before a gradient is ready is not judged, and each gradient
judges one round. An error here is a warning, and the run goes on without the probe.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail_cli.assembly import UpdateJudge
from cocktail_cli.errors import explain
from transport.membership import STRIKES
from transport.protocol import WeightedPacket

if TYPE_CHECKING:
    from .contribution_score import Probe, UsefulnessScore

log = logging.getLogger(__name__)

ENDS_WITHIN = 10.0  # seconds for a forward and backward pass under way

Updates = Sequence[WeightedPacket]


@dataclass(frozen=True)
class Committed:
    """A committed round, with the updates to judge, if any."""

    packet: bytes
    updates: Updates = ()
    held: frozenset[str] = frozenset()  # peers whose packets were shortened


class ProbeThread(UpdateJudge):
    """Runs the probe.

    Args:
        load: builds the probe at the global model of the round the run goes on with; called in the thread.
        tell: (peer, message) for the host.
    """

    def __init__(self, load: Callable[[], Probe], tell: Callable[[str, str], None]) -> None:
        self.load, self.tell = load, tell
        self.found: dict[str, str] = {}  # harmful peer -> why
        self.refused = Counter[str]()  # harmful peer -> refused packets
        self.weights: Mapping[str, float] = {}  # of peers whose packets count for less
        self.doubted = set[str]()  # peers that the host was told of
        self.rounds: queue.SimpleQueue[Committed | None] = queue.SimpleQueue()
        self.ready = threading.Event()  # a gradient has been computed that has judged no round
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._guarded, name="probe", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def committed(self, packet: bytes, updates: Updates, held: frozenset[str] = frozenset()) -> None:
        """Hand over the next durable round."""
        if self.thread.is_alive():
            self.rounds.put(Committed(packet, updates if self.ready.is_set() else (), held))

    def objection(self, peer: str, packet: bool = True) -> str:
        """Return why a peer's packet is refused, or "". After STRIKES a peer of this name is another one."""
        why = self.found.get(peer, "")
        self.refused[peer] += bool(why and packet)
        if self.refused[peer] == STRIKES:
            del self.found[peer], self.refused[peer]
        return why

    def weight(self, peer: str) -> float:
        """Return less than 1 for a doubted peer."""
        return self.weights.get(peer, 1.0)

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
        from .contribution_score import Evidence

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
        """Set the weights of doubted peers; tell the host once of each that counts for less than half."""
        self.weights = {peer: doubt.weight for peer, doubt in doubts.items() if doubt.weight < 1}
        for peer in [p for p, weight in self.weights.items() if weight < 0.5 and p not in self.doubted]:
            self.doubted.add(peer)
            self.tell(peer, doubts[peer].why)
