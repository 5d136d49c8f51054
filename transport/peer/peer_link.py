"""A peer's link to its hub as the training thread uses it: blocking calls that name what they wait for.

Training holds no socket and cannot stall the link; the thread that can is in connection_manager.py. A waiting
call polls `leave_requested`. The calls may be made from several threads.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import BinaryIO

from transport.protocol import (
    AnnouncedAnew,
    CurveKeys,
    Leaving,
    LinkLost,
    RefusedByHub,
    RolledBack,
    RunOver,
    RunURL,
    SessionRenewed,
    TooLong,
    TransportError,
    messages,
)
from transport.transfer import (
    CHUNK,
    HASH_BLOCK,
    ChunkBuffer,
    ChunkFile,
    ChunkSpool,
    Download,
    Sink,
    Spool,
    Upload,
)
from transport.wire import DealerWire, PeerWire, RateLimits, routes_to

from .connection_manager import ConnectionManager, HubPart, LinkLimits, SizeBounds, bound_of
from .peer_state import Elsewhere, PeerState, SessionState

WELCOME_S = 20.0  # a hub that takes connections may take this long to answer Hello with Welcome
# seconds after the request to leave, 25 s in all with the goodbye:
LEAVE_S = 15.0  # until an exchange in flight must be done
HANDOFF_S = 21.0  # until a residual handoff must be at the hub
HANDOFF_TARGET_S = 5.0  # duration a handoff is sized for; longer only if the uplink has become slower
RENEWED = "the hub gave this peer a new session; work not delivered before is void"
RENEWAL_S = 10.0  # from a lease that the hub refuses, on one connection, to the new session, on another
AWAY_S = 20.0  # seconds without a turn of the link: this machine slept, or its process was stopped
LOST_S = 2.0  # without a connection, before the user is told
POLL_S = 0.05  # how often a waiting call looks at `leave_requested`


class StopRequest(threading.Event):
    """An event with the time it was first set; a signal handler may set it."""

    at = inf  # monotonic seconds
    share = 1.0  # of the seconds that calls have after it

    def left(self, most: float) -> float:
        """Return the seconds left of the `most` that a call has after it."""
        return self.at + self.share * most - time.monotonic()

    def set(self) -> None:
        self.at = min(self.at, time.monotonic())
        super().set()


@dataclass(frozen=True)
class PeerIdentity:
    """The identity of a peer: fields of its Hello, and its keys."""

    name: str  # wanted; the hub makes it unique
    hardware: str = ""  # for people to read
    versions: dict[str, str] = field(default_factory=dict)
    keys: CurveKeys | None = None  # None: new ones
    alone: bool = True  # no other process with these keys goes by this name
    reachable: str = ""  # "host:port" of its server for other peers
    extra: dict[str, bytes] = field(default_factory=dict)  # bodies of extensions


class PeerLink:
    """A peer's link to its hub.

    connect(); fetch() what is lacking; ready(round, fingerprint); then next_round() and exchange() in turn,
    until next_round returns Over; leave(). Every call may raise SessionRenewed once: work not delivered is
    void then; catch up to `link.welcome.round`, call ready(), go on with next_round().

    Args:
        rate_limits: token buckets shared with other links, in place of `limits.bandwidth`.
        notify: called with a sentence when the connection is lost or restored.
    """

    def __init__(
        self,
        url: RunURL,
        identity: PeerIdentity,
        limits: LinkLimits = LinkLimits(),  # noqa: B008 - frozen
        *,
        wire: PeerWire | None = None,
        rate_limits: RateLimits | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.leave_requested = StopRequest()  # set it, from a signal handler too: waiting calls end
        me = identity
        about = me.name, me.hardware, me.versions, me.alone, me.reachable, me.extra
        hello = messages.Hello(messages.PROTOCOL, url.token, url.run, *about)
        self._state = PeerState(hello)
        self._wire = wire or DealerWire(routes_to(url), url.key, me.keys)
        self.rate_limits = rate_limits or RateLimits(limits.bandwidth)
        self._connections = ConnectionManager(self._wire, self._state, url, limits, self.rate_limits)
        self._changed, self._transfers = self._connections.changed, self._connections.transfers
        self.bounds_of_extensions: dict[str, str] = {}  # rows as in BOUNDS
        self._session = 1  # how many sessions the caller knows of
        self._ready_in = 0  # the session in which `ready` was last said
        self._beside: set[int] = set()  # threads, see `works_beside`
        self._notify, self._patience = notify, limits.patience
        self._lost_at: float | None = None  # since when there is no connection
        self._lost_told = ""  # the sentence last passed to `notify`
        self._uplink = 0.0  # bytes a second of the last upload; 0: none yet
        self.upload_s = 0.0  # seconds that upload took, or was waited for in vain
        self._cap = limits.bandwidth.up or inf  # a small packet passes the bucket at once, faster than this

    # ---- state ---------------------------------------------------------------------------------------------

    @property
    def welcome(self) -> messages.Welcome:
        """The newest Welcome: of the present session, with the round the run was at when it began."""
        assert self._state.welcome is not None, "connect first"
        return self._state.welcome

    @property
    def url(self) -> RunURL:
        """The run URL; of another hub, once that has taken over."""
        return self._connections.url

    @property
    def name(self) -> str:
        """Return the name the hub gave this peer."""
        return self.welcome.name

    @property
    def way(self) -> str:
        """Return by which way the hub was reached last: its address, or through what."""
        return self._wire.way

    @property
    def lost(self) -> bool:
        """True once the hub was given up, or has refused this peer."""
        return self._connections.broken is not None or self._state.refused is not None

    @property
    def connected(self) -> bool:
        """True while there is a control connection."""
        return self._connections.connected

    @property
    def newest_round(self) -> int:
        """Return the newest committed round that this peer has heard of; -1: none."""
        return self._state.newest

    @property
    def bytes_up(self) -> int:
        """Count the bytes sent so far, all connections, ZMTP and CURVE framing included."""
        return self._connections.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._connections.bytes_down

    # ---- calls that wait -----------------------------------------------------------------------------------

    def connect(self, timeout: float = 0.0, welcome_s: float = WELCOME_S) -> messages.Welcome:
        """Dial the hub and complete the handshake. While the hub is unreachable go on dialling for `timeout`
        seconds; if the host has to approve this peer, wait for the answer.

        Raises Unreachable, which says what failed, RefusedByHub, Leaving.
        """
        self._connections.start(time.monotonic() + timeout)
        try:
            until = timeout + welcome_s
            self._wait("the hub's welcome", lambda: bool(self._state.waits or self._state.welcome), until)
            if self._state.welcome is None:
                self._notify(self._state.waits)
                self._wait("the host's approval", lambda: self._state.welcome is not None, None)
        except TransportError:
            self.close()
            raise
        return self.welcome

    @property
    def bounds(self) -> SizeBounds | None:
        """Return what is known of the sizes of the run's objects; without it nothing is prefetched, and no
        round or packet that is announced is compared with it."""
        return self._connections.bounds

    @bounds.setter
    def bounds(self, bounds: SizeBounds) -> None:
        with self._changed:
            self._connections.bounds = bounds

    def leases_first(self, wanted: bool) -> None:
        """Let packets wait until the next lease is here, as where they are not needed at once."""
        self._connections.leases_first = wanted

    def fetch(self, name: str, most: int, sha256: str = "") -> bytes:
        """Fetch the object `name`, of at most `most` bytes, into memory.

        `most` is what this peer knows beforehand, whatever the hub says: of a longer object nothing is kept.
        `sha256` (hex) is checked if given, else the hub's own if it knows one. Raises KeyError if the hub has
        no such object, TooLong, ProtocolError if a checksum is wrong, Leaving, SessionRenewed, RunOver,
        LinkLost.
        """
        download = self.begin(name, most, sha256)
        try:
            return self.finish(download)
        finally:
            self.forget(download)

    def begin(self, name: str, most: int, sha256: str = "") -> Download:
        """Begin to fetch the object `name`; `finish` waits for it. Pass an unfinished one to `forget`."""

        def open_sink(size: int, digest: bytes) -> ChunkBuffer:
            return ChunkBuffer(size, bytes.fromhex(sha256) or digest, CHUNK)

        return self._begin(
            name, lambda: self._transfers.fetch(name, open_sink, most), prefetched_will_do=not sha256
        )

    def begin_spooled(self, name: str, most: int, spool: Spool) -> Download:
        """Begin to fetch the object `name` into a file without a name; `finish_spooled` waits for it. Pass it
        to `forget` in the end, finished or not."""

        def open_sink(size: int, digest: bytes) -> ChunkSpool:
            return spool.open(name, size, digest, CHUNK)

        begin = partial(self._transfers.fetch, name, open_sink, most)
        return self._begin(name, begin, prefetched_will_do=False)

    def finish_spooled(self, download: Download, tick: Callable[[], None] = lambda: None) -> BinaryIO:
        """Wait for a download of `begin_spooled`, calling `tick` now and then; return its file, which is
        there until `forget`. Raises as `fetch`, NoRoom and OSError (a full disk); may be repeated."""
        self.complete(download, tick)
        assert isinstance(download.sink, ChunkSpool)
        return download.sink.finish()

    def finish(self, download: Download, tick: Callable[[], None] = lambda: None) -> bytes:
        """Wait for a download of `begin`, calling `tick` now and then. Raises as `fetch`; may be repeated."""
        self.complete(download, tick)
        assert isinstance(download.sink, ChunkBuffer)
        self.forget(download)
        return download.sink.finish()

    def begin_file(self, name: str, to: Path, size: int, hashes: bytes) -> Download:
        """Begin to fetch the object `name` into the file `to`; `finish_file` waits for it.

        Each MiB is checked against `hashes` (chunks.py) as it arrives. Blocks already at `to` or `to`.part
        are checked first, and only wrong ones are fetched (`Download.received` counts the bytes). Right
        blocks stay, whatever fails here. Raises Leaving, OSError.
        """
        sink = ChunkFile(to, size, hashes, CHUNK)
        try:
            sink.verify(self.raise_if_leaving)
            begin = partial(self._transfers.fetch_chunks, name, sink, sink.map.missing)
            return self._begin(name, begin, prefetched_will_do=False)
        except BaseException:
            sink.close()
            raise

    def finish_file(self, download: Download, tick: Callable[[], None] = lambda: None) -> Path:
        """Wait for a download of `begin_file`, calling `tick` now and then. Raises as `fetch`, and OSError (a
        full disk); may be called again after SessionRenewed."""
        self.complete(download, tick)
        assert isinstance(download.sink, ChunkFile)
        self.forget(download)
        return download.sink.finish()

    # ---- objects whose chunks come from several links ------------------------------------------------------

    def prefetch_part(self, part_of: Callable[[messages.Committed], HubPart | None] | None) -> None:
        """Prefetch only this part of packets, as the rest comes from elsewhere; None: all. `part_of` is
        called in the link's thread, locked; without one nothing of packets is prefetched."""
        self._connections.part_of = part_of

    @property
    def uploads_now(self) -> bool:
        """Tell whether an update, or part of one, is on its way to the hub."""
        with self._changed:
            return any(upload.done is None for upload in self._transfers.uploads.values())

    def take_share(self, download: Download, most: int) -> range:
        """Take chunks out of a download that are to come by another link: whole blocks, from the end, up to
        `most` of them. None are left where the rest is under way, or soon is."""
        per = HASH_BLOCK // CHUNK
        with self._changed:
            todo = download.todo
            if len(todo) <= most or download.sink is None:
                return range(0)
            start = stop = todo[-1] + 1
            if stop % per and stop != download.sink.map.count:
                return range(0)
            while todo and todo[-1] == start - 1 and stop - start < most:
                start = todo.pop()
            while start < stop and start % per:  # the rest of that block is not to be had
                todo.append(start)
                start += 1
            return range(start, stop)

    def nothing_to_request(self, download: Download) -> bool:
        """Tell whether all of a download is here or under way."""
        with self._changed:
            return not download.todo and not download.asks and not download.begun

    def begin_chunks(self, name: str, sink: Sink, chunks: Iterable[int]) -> Download:
        """Begin to fetch these chunks, or return the download that was prefetched. Raises as `fetch`."""
        return self._begin(
            name, lambda: self._transfers.fetch_chunks(name, sink, chunks), prefetched_will_do=True
        )

    def supply(self, download: Download, index: int, payload: bytes) -> bool:
        """Add a chunk that has come by another link; False if it is here already, or not wanted any more."""
        with self._changed:
            wanted = self._transfers.downloads.get(download.name) is download
            if not wanted or download.sink is None or index in download.sink.map:
                return False
            download.todo.extend(download.sink.add(index, payload))
            self._changed.notify_all()
            return True

    def request(self, download: Download, chunks: Collection[int], *, again: bool = False) -> None:
        """Request more chunks of a download of `begin_chunks`: those that lack, or `again` all of them."""
        with self._changed:
            assert download.sink is not None
            if again:
                download.sink.map.drop(chunks)
            asked = {*download.begun, *download.todo}
            download.todo.extend(i for i in chunks if i not in asked and i not in download.sink.map)
            self._connections.say()

    def listen(self, takers: Mapping[str, Callable[[bytes], object]]) -> None:
        """Have bodies of extensions taken, by name, those that have come first; in the link's thread, locked.
        A taker raises ProtocolError where it cannot read one."""
        with self._changed:
            self._state.listen(takers)

    def void_if(self, voids: Callable[[messages.Round, messages.Round], bool]) -> None:
        """Have `exchange` raise AnnouncedAnew where a round that this peer has taken is announced again, and
        `voids(old, new)`; it is called in the link's thread, locked."""
        with self._changed:
            self._state.voids = voids

    def works_beside(self) -> None:
        """Let waits of the calling thread go on over a request to leave, as the exchange in flight needs it
        to its end; and over a renewed session, which is for the threads that train."""
        self._beside.add(threading.get_ident())

    def say(self, name: str, body: bytes) -> None:
        """Send a body to the half of an extension at the hub; lost where the connection is."""
        with self._changed:
            self._connections.say([messages.Extension(name, body)])

    def introduce(self, name: str, body: bytes) -> None:
        """Have the hub told this body of an extension with each new session and connection from now on."""
        with self._changed:
            self._state.introduce(name, body)

    def forget(self, *downloads: Download) -> None:
        """Drop downloads that are finished or not wanted any more; a file keeps the blocks it has."""
        with self._changed:
            for download in downloads:
                if self._transfers.downloads.get(download.name) is download:
                    self._transfers.forget(download.name)
                if isinstance(download.sink, ChunkFile | ChunkSpool):
                    download.sink.close()

    def raise_if_leaving(self) -> None:
        """Raise Leaving if this peer was asked to leave; for long work between calls."""
        if self.leave_requested.is_set():
            raise Leaving("asked to leave")

    def complete(self, download: Download, tick: Callable[[], None]) -> None:
        """Wait until all chunks are here, from wherever; raises as `fetch`, but checks no hash."""
        while not download.done:
            self._wait(f"the object {download.name}", lambda: download.done, 0.25, give_up=False)
            tick()
        if download.refused is not None:
            if download.name.startswith("lease/"):  # of a session that has ended, as is about to be told
                self._wait("a new session", self._check_ready, RENEWAL_S, give_up=False)
            with self._changed:
                self._check()
            raise KeyError(f"{download.name}: {download.refused}")
        if isinstance(download.error, TooLong):
            raise TooLong(f"{download.error}: {bound_of(download.name, self.bounds_of_extensions)}")
        if download.error is not None:
            raise download.error

    def _begin(self, name: str, begin: Callable[[], Download], *, prefetched_will_do: bool) -> Download:
        """Return the download of `name`: the one prefetched, or a new one once no other thread fetches it."""

        bound_of(name, self.bounds_of_extensions)  # nothing is fetched that the tables do not have

        def free() -> bool:
            other = self._transfers.downloads.get(name)
            return other is None or other.prefetched

        self._wait(f"another fetch of {name}", free, None)
        with self._changed:
            self._check()
            ahead = self._transfers.downloads.get(name)
            if ahead is not None and prefetched_will_do:
                ahead.prefetched = False
                return ahead
            download = begin()
            self._connections.say()
            return download

    def ask_anew(self) -> messages.Welcome:
        """Ask for a new Welcome, with the round the run is at now and its snapshots. Raises as `fetch`."""
        old = self.welcome
        with self._changed:
            self._connections.say(self._state.ask_anew(time.monotonic()))
        self._wait("the hub's welcome", lambda: self.welcome is not old, WELCOME_S)
        return self.welcome

    def next_round(self) -> messages.Round | messages.Over:
        """Wait for this peer's next round; Over at the end of the run, or once it was asked to leave."""
        taken: list[messages.Round] = []

        def there() -> bool:
            if self._state.over is None:
                self._check_ready()
            if not taken and (round := self._state.take_round()) is not None:
                taken.append(round)
            return bool(taken) or self._state.over is not None

        try:
            self._wait("the next round", there, None)
        except Leaving:
            return messages.Over("asked to leave", False)
        if taken:
            return taken[0]
        assert self._state.over is not None
        return self._state.over

    def wait(self, what: str, there: Callable[[], bool], timeout: float) -> None:
        """Wait until `there()`, which what comes over this link makes true, or the time is over. Raises as
        `fetch`."""
        self._wait(what, there, timeout, give_up=False)

    @property
    def heard_s(self) -> float:
        """Return the seconds since the hub was last heard; inf while there is no session with it."""
        here = self._state.link is SessionState.JOINED
        return time.monotonic() - self._state.heard if here else inf

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Return where else the run is looked for if the hub is lost."""
        return self._state.elsewhere

    @elsewhere.setter
    def elsewhere(self, place: Elsewhere | None) -> None:
        with self._changed:
            self._state.elsewhere = place

    @property
    def over(self) -> messages.Over | None:
        """The end of the run, once it was told."""
        return self._state.over

    def exchange(
        self, round: int, packet: bytes, report: messages.Report, beside: Mapping[str, bytes] = {}
    ) -> messages.Committed:
        """Upload this peer's packet of `round` and wait until the round is durable. If this peer's name is
        not in `accepted`, the packet came too late and stays in the residual.

        Args:
            beside: more objects that go up with it, by name.

        With `leave_requested` set it still waits LEAVE_S for the exchange in flight. Raises AnnouncedAnew
        (see `void_if`), RunOver, SessionRenewed, RefusedByHub, LinkLost, and Leaving, whose `arrived` says
        whether the hub has the packet.
        """
        named = {**beside, f"update/{round}": packet}
        size, started = sum(map(len, named.values())), time.monotonic()
        uploads: list[Upload] = []
        with self._changed:
            self._check()
            if round not in self._state.commits and self._state.anew is None:
                uploads = [self._upload(name, data) for name, data in named.items()]
            self._connections.say(self._state.report(report))
        self.upload_s = 0.0

        def there() -> bool:
            if not self.upload_s and uploads and all(upload.arrived for upload in uploads):
                self.upload_s = max(1e-3, time.monotonic() - started)
                self._uplink = size / self.upload_s
            return self._state.settled(round)

        try:
            self._wait(f"the commit of round {round}", there, None, leave_s=LEAVE_S)
        except Leaving as leaving:
            arrived = [upload.arrived for upload in uploads] or [None]
            leaving.arrived = False if False in arrived else None if None in arrived else True
            raise
        finally:
            self.upload_s = self.upload_s or (time.monotonic() - started) * bool(uploads)
            with self._changed:
                for name in named:
                    self._transfers.withdraw(name)
        with self._changed:
            if (committed := self._state.commits.get(round)) is not None:
                return committed
            if self._state.over is not None:
                raise RunOver.of(self._state.over)
            anew = self._state.take_anew()
            assert anew is not None
            raise AnnouncedAnew(anew)

    @property
    def room(self) -> int:
        """Bytes of a handoff that this peer, asked to leave, has still time to upload; 0: not known."""
        left = 0.0 if self._connections.closing else self.leave_requested.left(HANDOFF_S)
        return int(min(self._uplink, self._cap) * max(0.0, min(HANDOFF_TARGET_S, left)))

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        """Upload the residual handoff of this peer, whose global model is of `round`.

        Returns True if the hub has it, False if it certainly has not, None if that is not known. Waits until
        HANDOFF_S after the request to leave; raises as `exchange`, except Leaving.
        """
        return self.put(f"handoff/{round}", packet)

    def put(
        self, name: str, data: bytes, watch: Callable[[Upload], None] = lambda upload: None
    ) -> bool | None:
        """Upload the object `name` and wait until the hub has it or refuses it; returns and raises as
        `hand_over`. `watch` is called while waiting, and may raise to give up."""
        with self._changed:
            self._check()
            upload = self._upload(name, data)
            self._connections.say()

        def there() -> bool:
            watch(upload)
            return upload.done is not None

        try:
            self._wait(f"the hub to take {name}", there, None, leave_s=HANDOFF_S)
        except Leaving:
            return upload.arrived
        finally:
            with self._changed:
                self._transfers.withdraw(name)
        return upload.arrived

    def _upload(self, name: str, data: bytes) -> Upload:
        return self._transfers.upload(name, data, hashlib.sha256(data).digest())

    # ---- calls that do not wait ----------------------------------------------------------------------------

    def ready(self, round: int, fingerprint: int, holds: dict[str, str] | None = None) -> None:
        """Tell the hub that this peer has the global model of `round`. `holds`: see messages.Ready."""
        with self._changed:
            self._check()
            self._ready_in = self._state.sessions
            self._connections.say(self._state.ready(messages.Ready(round, fingerprint, holds or {})))

    def evaluated(
        self, round: int, part: int, loss_sum: float, tokens: int, figures: Sequence[float] = ()
    ) -> None:
        """Report the loss of the global model of `round` over this part of the evaluation set."""
        message = messages.Evaluated(round, part, loss_sum, tokens, list(figures))
        with self._changed:
            self._check()
            self._connections.say(self._state.evaluated(message))

    def leave(self, reason: str, timeout: float = 2.0) -> None:
        """Send Leave, wait up to `timeout` seconds for the hub's answer, and close."""
        with self._changed:
            if self._state.link in (SessionState.JOINED, SessionState.OVER) and self._connections.alive:
                self._connections.say(self._state.leave(messages.Leave(reason)))
                self._changed.wait_for(lambda: self._state.parted or not self._connections.connected, timeout)
        self.close()

    def close(self) -> None:
        """Close all connections. Without `leave` before, the hub takes this peer for lost."""
        self._connections.close()

    def abandon(self) -> None:
        """End every waiting call at once with LinkLost. For signal handlers: takes no lock."""
        self._connections.closing = True

    # ---- waiting -------------------------------------------------------------------------------------------

    def _wait(
        self,
        what: str,
        there: Callable[[], bool],
        timeout: float | None,
        *,
        give_up: bool = True,
        leave_s: float = 0.0,
    ) -> None:
        """Wait until `there()`, or raise. After `timeout` raise LinkLost if `give_up`, else return."""
        started = time.monotonic()
        if threading.get_ident() in self._beside:
            leave_s = HANDOFF_S
        with self._changed:
            sessions = self._state.sessions
            while not there():
                self._check()
                if self._state.sessions > sessions:  # another thread was told; this wait is void too
                    raise SessionRenewed(RENEWED)
                now = time.monotonic()
                if timeout is not None and now - started >= timeout:
                    if give_up:
                        raise LinkLost(f"waited {timeout:.0f} s for {what}")
                    return
                self._notify_of_link(now)
                if self.leave_requested.is_set() and (
                    self.leave_requested.left(leave_s) <= 0 or not self._connections.connected
                ):
                    raise Leaving(f"asked to leave while waiting for {what}")
                # all else notifies `changed`; a signal handler that sets the flag must not take locks
                self._changed.wait(POLL_S)

    def _notify_of_link(self, now: float) -> None:
        """Notify once that the connection has been lost for a while, and once that it is restored."""
        if (away := self._connections.away_s) > AWAY_S:
            self._connections.away_s = 0.0
            self._notify(f"this machine was away for {away:.0f} s")
        state, where, how_long = self._state, self._wire.way, f"for up to {self._patience:.0f} s"
        if state.welcome is None or state.link not in (SessionState.OFFLINE, SessionState.GREETING):
            if self._lost_told:
                self._notify(f"connected to {where} again")
            self._lost_at, self._lost_told = None, ""
        elif self._lost_at is None:
            self._lost_at = now
        elif now - self._lost_at >= LOST_S:
            lost = f"the connection to {where} is lost; dialling again, {how_long}"
            old = f"the hub at {where} is ignored: {state.replaced}; looking for the other, {how_long}"
            if self._lost_told != (said := old if state.replaced else lost):
                self._lost_told = said
                self._notify(said)

    def _check_ready(self) -> bool:
        """Raise SessionRenewed where `ready` was said in a session before this one, whoever was told of it.
        The caller holds the lock."""
        if self._ready_in and self._state.sessions > self._ready_in:
            self._session = self._state.sessions
            raise SessionRenewed(RENEWED)
        return False

    def _check(self) -> None:
        """Raise if the session or the link has ended. The caller holds the lock."""
        connections, state = self._connections, self._state
        if connections.broken is not None:
            raise connections.broken
        if connections.closing:
            raise (Leaving if self.leave_requested.is_set() else LinkLost)("the link is closed")
        if state.refused is not None:
            raise RefusedByHub(state.refused.code, state.refused.reason)
        if state.over is not None and not connections.connected:
            raise RunOver.of(state.over)
        if state.rolled_back:
            raise RolledBack(state.rolled_back)
        if state.sessions > self._session and threading.get_ident() not in self._beside:
            self._session = state.sessions
            raise SessionRenewed(RENEWED)
