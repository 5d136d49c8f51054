"""A peer's connection as the training loop wants it: transport's PeerLink in the shape of recipes' Link."""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transport.aggregators import digest_of
from transport.ledger import read_packets
from transport.peer import LEAVE_S
from transport.protocol import Committed, Over, Reopened, Report, Round
from transport.transfer import BandwidthBudget

if TYPE_CHECKING:
    from recipes.training import Delivery
    from transport import PeerLink
    from transport.aggregators import AggregatorThread, ShardClients

HAND_OVER_S = 5.0  # seconds for an owner to hear the last of the hub, before it hands over
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
        self.why = ""  # this peer leaves, where there is more to say of it than that it was asked to
        self.shards = 1  # of the run's vector
        self.owning: AggregatorThread | None = None  # where this peer can own some
        self.direct: ShardClients | None = None  # to owners that can be reached
        self.committed: Committed | None = None  # the newest
        self.slot = BandwidthBudget()  # what its line carries beside its compute
        self.opened_at = 0.0  # when the newest round was
        self.spans = 1  # rounds that the lease before the newest one was to last

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far: to the hub, to owners, at this owner's door."""
        up, down = self.direct.traffic if self.direct is not None else (0, 0)
        door = self.owning.door if self.owning is not None else None
        if door is not None:
            up, down = up + door.bytes_up, down + door.bytes_down
        return self.link.bytes_up + up, self.link.bytes_down + down

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The end of the run and the wish to leave, in the loop's words."""
        from recipes.training import Interrupted
        from transport.protocol import Leaving, RunOver

        try:
            yield
        except RunOver as over:
            self.ended, self.finished, self.resumable = str(over), over.finished, over.resumable
            raise Interrupted(self.ended) from over
        except Leaving as leaving:
            raise Interrupted(str(leaving), leaving.arrived) from leaving

    @property
    def fits(self) -> int:
        return self.slot.up

    def fetch(self, name: str) -> bytes:
        started = time.monotonic()
        with self.waiting():
            packet = self.assembled(name)
            packet = self.link.fetch(name) if packet is None else packet
        if name.startswith("packet/"):
            now = time.monotonic()
            self.slot = self.slot.came(len(packet), now - started).ended(now - self.opened_at)
        return packet

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
        self.spans = self.round.spans if self.round is not None else 1
        self.round, self.opened_at = message, time.monotonic()
        return message

    def exchange(self, packet: bytes, delivery: Delivery) -> Committed:
        self.slot = self.slot.computed(delivery.compute_s / self.spans)
        while True:
            try:
                self.committed = self._exchange(packet, delivery)
                return self.committed
            except Reopened as reopened:
                self.round = reopened.again

    def _exchange(self, packet: bytes, delivery: Delivery) -> Committed:
        """Cut the packet for whoever owns shards, bring each its part, wait for the commit."""
        directly = 0.0
        rest, parts = self.cut(packet)
        report = Report(
            round=delivery.round,
            fingerprint=delivery.fingerprint,
            delivers=delivery.delivers,
            loss_sum=delivery.loss_sum,
            tokens=delivery.tokens,
            compute_s=delivery.compute_s,
            wait_s=delivery.wait_s,
            fits=self.slot.down,
            parts={name: digest_of(part) for name, part in parts.items()},
        )
        mine = parts.pop(self.name, None)
        if mine is not None and self.owning is not None:
            self.owning.part(delivery.round, mine)
        if parts and self.direct is not None and self.round is not None:
            started = time.monotonic()
            parts = self.direct.send(delivery.round, self.round.owners, parts, self.enough)
            directly = time.monotonic() - started
        with self.waiting():
            committed = self.link.exchange(delivery.round, rest, report, parts)
        self.slot = self.slot.sent(len(packet), directly + self.link.upload_s)
        return committed

    def enough(self) -> bool:
        """Is the round over, or this peer to be gone soon: nothing is brought to owners any more."""
        late = time.monotonic() - self.link.leave_requested.at > LEAVE_S
        return late or (self.round is not None and self.link.newest_round >= self.round.round)

    def assembled(self, name: str) -> bytes | None:
        """The packet of the round just committed, from its owners; None: it is to be had from the hub."""
        round, committed, direct = self.round, self.committed, self.direct
        if round is None or committed is None or direct is None or name != f"packet/{committed.round}":
            return None
        if committed.round != round.round or not any(owner.address for owner in round.owners):
            return None
        from compress import PacketError
        from recipes.algorithm import merge_packets

        owners = [owner for owner in round.owners if owner.name not in committed.lost]
        dialled = [owner for owner in owners if not self.by_hub(owner.name)]
        found = direct.fetch(round.round, dialled, committed.size)
        mine = self.owning.packet(round.round) if self.owning is not None else None
        if mine is not None:
            found[self.name] = mine
        try:
            parts = [found.get(o.name) or self.link.fetch(f"shard/{round.round}/{o.name}") for o in owners]
            if sum(len(owner.shards) for owner in round.owners) < self.shards:
                parts.append(self.link.fetch(f"shard/{round.round}"))
            packet = merge_packets(parts, self.shards)
        except (KeyError, PacketError):
            return None
        return packet if hashlib.sha256(packet).hexdigest() == committed.sha256 else None

    def by_hub(self, owner: str) -> bool:
        """Is an owner's packet to come from the hub, which has it for somebody: the member that follows the
        owner. Then nobody sends more than any other.
        """
        members = self.round.members if self.round is not None else []
        after = members[(members.index(owner) + 1) % len(members)] if owner in members else ""
        return self.name in (after, owner)

    def cut(self, packet: bytes) -> tuple[bytes, dict[str, bytes]]:
        """What of a packet the hub is to have, empty where it owns nothing, and what each owner."""
        owners = self.round.owners if self.round is not None else []
        if not owners:
            return packet, {}
        from recipes.algorithm import select_shards

        parts = {owner.name: select_shards(packet, owner.shards, self.shards) for owner in owners}
        hubs = set(range(self.shards)).difference(*(owner.shards for owner in owners))
        return select_shards(packet, hubs, self.shards) if hubs else b"", parts

    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None:
        self.link.evaluated(round, part, loss_sum, tokens)

    @property
    def room(self) -> int:
        return self.link.room

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        with self.waiting():
            return self.link.hand_over(round, packet)

    def leave(self, reason: str) -> None:
        if self.owning is not None:
            if self.ended is None:
                self.owning.leave(HAND_OVER_S)
            self.owning.close()
        if self.direct is not None:
            self.direct.close()
        self.link.leave(self.why or reason)
