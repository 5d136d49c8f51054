"""A peer's side of packets that peers pass on: it fetches from its sources, passes its own stripe on, and
falls back to the hub.

    stripe of this peer, chunks of no stripe   from the hub, as soon as the round is committed
    stripe of another                          from that peer, while it is still receiving it

The hub sends what a source does not: at once where it is lost or refuses, else after some seconds without
a chunk. The packet is used if it has the hash that the hub has committed. If not, passed chunks are fetched
from the hub too, which shows whose were wrong. The hub hears of every source that fails.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

import msgspec

from transport.direct import DirectLinks, Fragment, PeerServer, ReachablePeer, StallDetector
from transport.peer import HubPart, Newest, PeerLink
from transport.protocol import PACKET, LinkLost, ProtocolError, TransportError, messages, round_of
from transport.transfer import ChunkBuffer, ChunkMap, Download

from .bodies import NAME, PacketSource, SourceFailed, Sources

log = logging.getLogger(__name__)

KEPT = 8  # rounds whose packet may still be fetched, or is to be committed
PASSED = 2  # of these, the newest ones that sources still pass on
STALL_S = 4.0  # without a chunk, at least
FIRST_S = 10.0  # the same while it is not known how long a packet takes
LATE = 3.0  # times the usual: a source that is slower has failed
SERVED = 4  # rounds whose packet is passed on: peers may be behind
MEMBERS = "members"  # of the round


class PacketSources:
    """Fetches packets of a run whose peers pass them on.

    Args:
        dial: makes an unconnected link to a source.
        server: passes this peer's stripes on; None: it cannot be reached, or does not want to.
    """

    def __init__(
        self, link: PeerLink, dial: Callable[[ReachablePeer], PeerLink], server: PeerServer | None = None
    ) -> None:
        self._link, self._links = link, DirectLinks(dial)
        self.passed = None if server is None else PassedPackets(server)
        self._named = Newest[Sources](KEPT)  # by round
        self._packets: dict[int, tuple[ChunkBuffer, Sources]] = {}  # by round, once it is committed
        self._rates: deque[float] = deque(maxlen=5)  # bytes a second of whole packets
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="cocktail-source")
        link.prefetch_part(self._hub_part)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far, beside those of the link to the hub and of the server."""
        return self._links.traffic

    def named(self, sources: Sources) -> None:
        """Note who passes on the packet that is about to be committed; in the link's thread."""
        self._named.add(sources.round, sources)

    def _hub_part(self, committed: messages.Committed) -> HubPart | None:
        """Choose what the hub sends, None: all, and begin to pass on this peer's stripe; in the link's
        thread. A Committed that is repeated finds what has come."""
        round, found = committed.round, self._packets.get(committed.round)
        if found is None and (named := self._named.pop(round)) is not None:
            found = ChunkBuffer(committed.size, bytes.fromhex(committed.sha256), named.chunk), named
            kept = {r: old for r, old in self._packets.items() if r > round - KEPT}
            self._packets = kept | {round: found}
            for source in named.sources:
                if source.name == self._link.name and self.passed is not None:
                    self.passed.pass_on(round, named.keys, found[0], stripe(source, found[0]))
        if found is None:
            return None
        packet, named = found
        passed = {index for source in self._others(named) for index in stripe(source, packet)}
        return HubPart(packet, [index for index in packet.map.missing if index not in passed])

    def _others(self, named: Sources) -> list[PacketSource]:
        return [source for source in named.sources if source.name != self._link.name]

    def fetch(self, round: int) -> bytes | None:
        """Fetch the packet of a round; None if the hub has named no sources. Raises as PeerLink.fetch."""
        if (found := self._packets.get(round)) is None:
            return None
        packet, sources = found
        began, name = time.monotonic(), f"packet/{round}"
        download = self._link.begin_chunks(name, packet, packet.map.missing)
        fetch = PacketFetch(self._link, download, packet)
        usual = packet.map.size / median(self._rates) if self._rates else FIRST_S
        late_at = began + max(2 * STALL_S, LATE * usual)
        others = self._others(sources)
        if self._link.newest_round >= round + PASSED:
            others = []  # they do not serve it any more
            self._link.request(download, packet.map.missing)
        for source in others:
            self._threads.submit(self._receive, fetch, source, max(STALL_S, usual))
        try:
            self._link.complete(download, lambda: fetch.give_up(others, time.monotonic() >= late_at))
            whole = fetch.checked()
        finally:
            fetch.over = True
            self._link.forget(download)
        self._rates.append(packet.map.size / max(1e-3, time.monotonic() - began))
        return whole

    def _receive(self, fetch: PacketFetch, source: PacketSource, still_s: float) -> None:
        """Receive a stripe; in a thread of its own."""
        try:
            link = self._links.to(source)
            sink = ForwardedChunks(
                fetch.packet.map, stripe(source, fetch.packet), partial(fetch.supply, source.name)
            )
            sink.receive(link, fetch.download.name, partial(fetch.look, source.name, link), still_s)
        except (TransportError, KeyError, ProtocolError) as error:
            log.debug("from %s", source.name, exc_info=error)
            if not fetch.over:
                self._links.drop(source.name)
            fetch.fail(source, str(error.args[0] if isinstance(error, KeyError) else error))

    def close(self) -> None:
        """Hang up on all sources."""
        self._links.close()
        self._threads.shutdown(wait=False)


class PacketFetch:
    """One packet whose chunks come from several peers. Any thread may call."""

    def __init__(self, link: PeerLink, download: Download, packet: ChunkBuffer) -> None:
        self.link, self.download, self.packet = link, download, packet
        self.over = False  # nothing is taken from sources any more
        self._from: dict[int, str] = {}  # chunk -> the source that has passed it on
        self._failed: set[str] = set()

    def supply(self, source: str, index: int, payload: bytes) -> None:
        """Take a chunk of a source."""
        if not self.over and source not in self._failed and self.link.supply(self.download, index, payload):
            self._from[index] = source

    def look(self, source: str, link: PeerLink) -> None:
        """Raise LinkLost if this source is gone, or nothing of it is wanted any more."""
        if not link.connected or self.over or source in self._failed:
            raise LinkLost("its connection is lost, or it is not needed any more")

    def fail(self, source: PacketSource, reason: str) -> None:
        """Have the hub send what this source has not, and tell it so."""
        if source.name in self._failed or self.over:
            return
        self._failed.add(source.name)
        report_failed(self.link, source.name, reason)
        self.link.request(self.download, stripe(source, self.packet))

    def give_up(self, sources: Iterable[PacketSource], late: bool) -> None:
        """Fail the sources that are too slow, if it is `late`."""
        for source in sources if late else ():
            if any(index not in self.packet.map for index in stripe(source, self.packet)):
                self.fail(source, "it passes its part on too slowly")

    def checked(self) -> bytes:
        """Return the packet if it has the hash that the hub has committed, else fetch it from the hub."""
        try:
            return self.packet.finish()
        except ProtocolError:
            if not self._from:
                raise
        self.over = True
        chunk = self.packet.map.chunk
        passed = {index: self.packet.read(index, chunk) for index in sorted(self._from)}
        self.link.request(self.download, passed, again=True)
        self.link.complete(self.download, lambda: None)
        found = self.packet.finish()
        wrong = {self._from[index] for index, was in passed.items() if self.packet.read(index, chunk) != was}
        for name in sorted(wrong):
            report_failed(self.link, name, "it passes wrong bytes on", wrong=True)
        return found


class ForwardedChunks:
    """A download's sink that hands the chunks of one stripe on, each as it comes."""

    def __init__(self, whole: ChunkMap, chunks: range, take: Callable[[int, bytes], None]) -> None:
        others = ((1 << whole.count) - 1) ^ (((1 << len(chunks)) - 1) << chunks.start)
        self.map, self._take = ChunkMap(whole.size, whole.chunk, others), take
        self._chunks = chunks

    def add(self, index: int, payload: bytes) -> tuple[int, ...]:
        if self.map.add(index, payload):
            self._take(index, payload)
        return ()

    def receive(
        self, link: PeerLink, name: str, look: Callable[[], None], still_s: float | None = None
    ) -> None:
        """Fetch the stripe from the peer at `link`, whose wait `look` may end by what it raises.

        Raises TransportError, KeyError, and what `take` and `look` raise.
        """
        download, stall = link.begin_chunks(name, self, self._chunks), StallDetector(still_s)

        def both() -> None:
            look()
            stall.download(download)

        try:
            link.complete(download, both)
        finally:
            link.forget(download)


def report_failed(link: PeerLink, source: str, reason: str, *, wrong: bool = False) -> None:
    """Tell the hub that a source has failed this peer, or (`wrong`) has sent other bytes than the hub has."""
    link.say(NAME, msgspec.msgpack.encode(SourceFailed(source, wrong, reason[:1000])))


def stripe(source: PacketSource, packet: ChunkBuffer) -> range:
    """Return the chunks that a source passes on."""
    return range(source.first, min(source.stop, packet.map.count))


@dataclass(frozen=True)
class PassedPacket:
    """A packet that this peer fetches, and the chunks of it that it passes on."""

    packet: ChunkBuffer
    chunks: range

    def read(self, m: messages.Get) -> bytes | memoryview | None:
        """Return a fragment, None if it is not here yet. Raises KeyError if it is not passed on."""
        if m.index * m.chunk // self.packet.map.chunk not in self.chunks:
            raise KeyError(f"this peer does not pass on fragment {m.index}")
        return self.packet.read(m.index, m.chunk)

    def is_last(self, m: messages.Get) -> bool:
        """Tell whether a fragment is the last one that this peer passes on."""
        whole = self.packet.map
        return (m.index + 1) * m.chunk >= min(self.chunks.stop * whole.chunk, whole.size)


class PassedPackets:
    """Serves what this peer passes on."""

    def __init__(self, server: PeerServer) -> None:
        self.server = server
        self._round = 0  # the newest that is passed on
        self._passed: dict[int, PassedPacket] = {}  # by round
        self.lacking: set[str] = set()  # members that lack the end of what the newest packet passes on
        server.serve(PACKET, self._read, MEMBERS)

    def pass_on(self, round: int, members: Mapping[str, str], packet: ChunkBuffer, chunks: range) -> None:
        """Serve these chunks of a packet to `members` (name -> key), each as soon as it is in the buffer."""
        self.server.admit(MEMBERS, members)
        kept = {r: passed for r, passed in self._passed.items() if r > round - SERVED}
        self._passed, self.lacking = kept | {round: PassedPacket(packet, chunks)}, set(members)
        self._round = round

    def _read(self, member: str, m: messages.Get) -> Fragment | None:
        round = round_of(PACKET, m.name)
        passed = None if round is None else self._passed.get(round)
        if passed is not None and (payload := passed.read(m)) is not None:
            if round == self._round and passed.is_last(m):
                self.lacking.discard(member)
            return Fragment(payload, passed.packet.map.size, passed.packet.sha256)
        if round is None or round < self._round:
            raise KeyError("it is not served here, or not any more")
        return None
