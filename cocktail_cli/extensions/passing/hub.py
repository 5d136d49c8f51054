"""The hub's coordination of peers that pass packets on: who passes which chunks, and who has failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import msgspec

from transport.actions import CommitDone
from transport.hub import HubParts
from transport.membership import Session, State
from transport.protocol import Event, messages, read_msgpack
from transport.scheduling import Exchange, HubExtension

from .bodies import NAME, FileHelpers, Newcomer, PacketSource, Source, SourceFailed, Sources
from .passing_choice import PassingChoice, chunk_of, divide

HELPERS = 8  # of a round: each is one more connection for every peer
FILE_HELPERS = 4  # of a newcomer
SLOWEST = 0.25  # of the median uplink; a slower peer delays all others


class PassingCoordinator(HubExtension):
    """State of a run whose hub aggregates and whose reachable peers may pass its packets on.

    A peer that fails one of its receivers is not its source any more; if it fails half of them, nobody's.
    Wrong bytes count against its key, all else against its session: it may come back with a better line.
    """

    name, dials = NAME, True

    def __init__(self, hub: HubParts, mode: str) -> None:
        self._own_key, self._out, self._members = hub.settings.own_key, hub.out, hub.members
        self.choice, self._began = PassingChoice(mode), False  # once a peer could be reached
        self._failed = defaultdict[str, set[str]](set)  # key or session of a helper -> keys it has failed
        self._told: set[str] = set()  # helpers whose end the host was told of
        self._peers = 0  # members of the newest round, but those of the hub's machine

    def status(self) -> dict[str, bool]:
        """Tell whether peers pass packets on at present."""
        return {"passing": self._began and self.choice.on}

    def committed(self, ex: Exchange, done: CommitDone, now: float) -> Sequence[Event]:
        """Tell the members of a durable round, before its Committed, who passes what of its packet on."""
        self._began = self._began or any(s.address and s.reachable for s in self._members)
        if self._began and done.packets:
            self._share_out(ex, done.size)
        return ()

    def _share_out(self, ex: Exchange, size: int) -> None:
        peers = [s for s in self._members.present(ex.members) if s.conn and s.key != self._own_key]
        self._peers = len(peers)
        self.choice.note([s.fits for s in peers if s.id not in ex.spans], size)
        if not self.choice.on or len(peers) < 2:
            return
        helpers = {s.name: s for s in self._helpers(peers)}
        fastest = max((s.uplink for s in helpers.values()), default=0.0) or 1.0  # for those not measured yet
        uplinks = {name: helper.uplink or fastest for name, helper in helpers.items()}
        chunk = chunk_of(size)
        stripes = divide(max(1, -(-size // chunk)), uplinks, len(peers), ex.round)
        sources = {
            name: PacketSource(name, helper.key, helper.address, stripes[name].start, stripes[name].stop)
            for name, helper in helpers.items()
            if name in stripes
        }
        for peer in peers:
            mine = [s for n, s in sources.items() if peer.key not in self._failed_by(helpers[n])]
            keys = {p.name: p.key for p in peers if p is not peer} if peer.name in sources else {}
            if mine:
                self._say(peer, Sources(ex.round, chunk, mine, keys))

    def _say(self, session: Session, body: Sources | Newcomer) -> None:
        self._out.send(session.conn, messages.Extension(NAME, msgspec.msgpack.encode(body)))

    def welcome(self, session: Session) -> bytes:
        """Name to a newcomer the peers that have the run's files on their disks, and name it to them."""
        if session.state is not State.JOINING or session.role != "peer":
            return b""
        able = [s for s in self._members if s.conn and s.state is not State.JOINING]
        others = [s for s in able if s.key not in (session.key, self._own_key)]
        helpers = self._helpers(others)[:FILE_HELPERS]
        for helper in helpers:
            self._say(helper, Newcomer(session.name, session.key))
        named = FileHelpers([Source(s.name, s.key, s.address) for s in helpers])
        return msgspec.msgpack.encode(named) if helpers else b""

    def received(self, session: Session, body: bytes, now: float) -> None:
        """Take a peer's word that a source has failed it; the two are not paired again."""
        m = read_msgpack(body, SourceFailed, "what it says of a source")
        helper = next((s for s in self._members if s.name == m.source), None)
        if helper is None or helper is session or self._members.quiet:  # it has left, or the run is over
            return
        self._failed[helper.key if m.wrong else helper.id].add(session.key)
        if self._lost(helper) and helper.id not in self._told:
            self._told.add(helper.id)
            self._out.warn(f"passes no packets on any more: {m.reason}", helper.name)

    def _helpers(self, peers: list[Session]) -> list[Session]:
        """Return the peers that can pass packets on, the fastest first."""
        able = [s for s in peers if s.address and s.reachable and not self._lost(s)]
        least = SLOWEST * median([s.uplink for s in able if s.uplink] or [0.0])
        fast = [s for s in able if not s.uplink or s.uplink >= least]
        return sorted(fast, key=lambda s: (-s.uplink, s.name))[:HELPERS]

    def _failed_by(self, helper: Session) -> set[str]:
        return self._failed.get(helper.key, set()) | self._failed.get(helper.id, set())

    def _lost(self, helper: Session) -> bool:
        """Tell whether a helper has failed half of its receivers; one of them may lie."""
        return 2 * len(self._failed_by(helper)) >= max(1, self._peers - 1)
