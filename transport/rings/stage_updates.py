"""Updates of replicas whose machines send their own shards: which parts are at the hub.

The head reports the SHA-256 of each part with its own update. That counts as arrived once all of them are
here, whichever machine of its ring has sent them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import replace

from transport import actions as do
from transport.membership import Roster, Session
from transport.protocol import (
    STAGE,
    Cost,
    HubDelegate,
    ObjectKind,
    TrafficDelta,
    messages,
    round_and_shards,
    round_of,
)
from transport.scheduling import Rounds
from transport.transfer import ObjectSource, ObjectStore, memory_source

from .ring_table import RingTable

SELECTED = ObjectKind("packet/<round>/<shards>", ("peer", "stage"), "the codec's longest packet", Cost.MADE)
KEPT = 64  # packets of a few shards cached
MOST_SHARDS = 1 << 10  # of a vector


class SelectedShards:
    """Serves packets of a few shards to the machines of a replica, each made once; in the reader thread."""

    def __init__(self, store: ObjectStore, work: HubDelegate, members: Roster) -> None:
        self._store, self._work, self._members = store, work, members
        self._made: OrderedDict[str, ObjectSource] = OrderedDict()

    def serve(self) -> None:
        """Add the row."""
        self._store.serve(SELECTED, self._find)

    def _find(self, session: str, name: str, _: tuple[str, ...]) -> ObjectSource:
        asking = self._members.get(session)
        if asking is None or all(one.role != "stage" for one in self._members.with_key(asking.key)):
            raise KeyError("only machines of a replica fetch some shards of a packet")
        if (of := round_and_shards(name, MOST_SHARDS)) is None:
            raise KeyError(f"no vector of this run has the shards of {name}")
        if name not in self._made:
            packet = self._store.packet(of[0])
            whole = packet.read(0, packet.size)
            self._made[name] = memory_source(self._work.restricted("", whole, frozenset(of[1]))[0])
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
        return self._made[name]


class StageUpdates:
    """Parts of the updates of one round, that of `rounds.round`.

    Args:
        table: says whose ring a machine is in.
    """

    def __init__(self, rounds: Rounds, members: Roster, table: RingTable) -> None:
        self._rounds, self._members, self._table = rounds, members, table
        self._round = -1
        self._digests: dict[str, str] = {}  # session of a lent machine -> SHA-256 of its part
        self._heads: dict[str, str] = {}  # the same -> the key of its head

    def refusal(self, session: Session, name: str) -> str | None:
        """Return why this upload of a lent machine is not wanted, or None."""
        round, head = round_of(STAGE, name), self._head(session)
        if round is None:
            return f"nothing of the name {name!r} is wanted"
        of = self._of(head.key) if head is not None else []
        open_to = [ex for one in of if (ex := self._rounds.open_to(one.id, round)) is not None]
        if not open_to:
            return f"round {round} is not open to a replica of this machine, or is closed"
        whole = all(one.id in ex.claims for ex in open_to for one in of if one.id in ex.members)
        return "it is here already" if whole else None

    def arrived(self, session: Session, round: int, digest: str, now: float) -> None:
        """Note that a machine's part is here, whole. It replaces an earlier one of that machine."""
        session.seen = now
        head = self._head(session)
        if head is None or round != self._rounds.round:
            return
        if self._round != round:
            self._round, self._digests, self._heads = round, {}, {}
        self._digests[session.id], self._heads[session.id] = digest, head.key
        for one in self._of(head.key):
            self._rounds.check_arrived(one, now)

    def whole(self, session: Session, report: messages.Report) -> bool:
        """Tell whether all parts that a head has reported are here."""
        if not report.stages:
            return True
        here = {self._digests[one] for one, head in self._heads.items() if head == session.key}
        return self._round == report.round and here.issuperset(report.stages)

    def credited(self, moved: Mapping[str, TrafficDelta], members: Container[str]) -> dict[str, TrafficDelta]:
        """Count what the machines of a replica have moved as the replica's, where it is one of the members.

        Args:
            moved: bytes of a round, by the name of a session.
        """
        found = dict(moved)
        for machine in self._members:
            head = self._head(machine) if machine.role == "stage" else None
            of = [one.name for one in self._of(head.key) if one.id in members] if head is not None else []
            if head is not machine and len(of) == 1 and machine.name in found:
                own, before = found.pop(machine.name), found.get(of[0], TrafficDelta())
                found[of[0]] = replace(before, up=before.up + own.up, down=before.down + own.down)
        return found

    def senders(self, claim: do.Claim) -> list[str]:
        """Return the sessions of the machines that have sent the parts of an update. One that is the head of
        two rings may lack a part again, which the other ring has replaced."""
        found = {self._digests[one]: one for one, head in self._heads.items() if head == claim.key}
        return [found[digest] for digest in claim.stages if digest in found]

    def _head(self, session: Session) -> Session | None:
        """Return the head of a lent machine's ring; None: it is in none, or the head is lost."""
        ring = self._table.ring_of(session.id)
        return self._members.get(ring.machines[0]) if ring is not None else None

    def _of(self, key: str) -> list[Session]:
        """Return the sessions of peers with this key: one machine may be the head of several rings."""
        return [one for one in self._members.with_key(key) if one.role == "peer"]
