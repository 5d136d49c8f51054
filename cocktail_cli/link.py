"""A peer's connection as the training loop wants it: transport's PeerLink in the shape of recipes' Link."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transport.messages import Committed, Over, Report, Round
from transport.packet_log import read_packets

if TYPE_CHECKING:
    from recipes.finetune import Delivery
    from transport import PeerLink

AT_ONCE = 64  # packets of the ledger fetched as one object: what a joiner holds in memory


class RunLink:
    """What `recipes.finetune` calls; what it asks of the other rooms is nothing but this."""

    def __init__(self, link: PeerLink) -> None:
        self.link = link
        self.name = link.name  # known once the hub has welcomed this peer
        self.leaving: threading.Event = link.leave_requested
        self.holds: dict[str, str] = {}  # what this peer's model was made from
        self.round: Round | None = None  # the newest that was announced
        self.ended: str | None = None  # why the run is over, once it is
        self.finished = False  # whether it reached its end
        self.resumable = False  # whether it failed and may be started again

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The end of the run and the wish to leave, in the loop's words."""
        from recipes.finetune import Interrupted
        from transport.errors import Leaving, RunOver

        try:
            yield
        except RunOver as over:
            self.ended, self.finished, self.resumable = str(over), over.finished, over.resumable
            raise Interrupted(self.ended) from over
        except Leaving as leaving:
            raise Interrupted(str(leaving), leaving.arrived) from leaving

    def fetch(self, name: str) -> bytes:
        with self.waiting():
            return self.link.fetch(name)

    def packets(self, start: int, stop: int) -> Iterator[bytes]:
        """The committed packets of rounds start .. stop-1, in order, their checksums verified."""
        for first in range(start, stop, AT_ONCE):
            records = self.fetch(f"packets/{first}-{min(first + AT_ONCE, stop)}")
            yield from (packet for _, packet in read_packets(io.BytesIO(records)))

    def ready(self, round: int, fingerprint: int) -> None:
        self.link.ready(round, fingerprint, self.holds)

    def next_round(self) -> Round | None:
        """The next round of this peer; None when the run is over or this peer was asked to leave."""
        message = self.link.next_round()
        if isinstance(message, Over):
            if not self.leaving.is_set():
                self.ended, self.finished = message.reason, message.finished
                self.resumable = message.resumable
            return None
        self.round = message
        return message

    def exchange(self, packet: bytes, delivery: Delivery) -> Committed:
        report = Report(
            round=delivery.round,
            fingerprint=delivery.fingerprint,
            delivers=delivery.delivers,
            loss_sum=delivery.loss_sum,
            tokens=delivery.tokens,
            compute_s=delivery.compute_s,
            wait_s=delivery.wait_s,
        )
        with self.waiting():
            return self.link.exchange(delivery.round, packet, report)

    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None:
        self.link.evaluated(round, part, loss_sum, tokens)

    @property
    def room(self) -> int:
        return self.link.room

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        with self.waiting():
            return self.link.hand_over(round, packet)

    def leave(self, reason: str) -> None:
        self.link.leave(reason)
