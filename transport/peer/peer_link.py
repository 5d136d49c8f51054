"""A peer's link to its hub, as the training thread sees it: calls that wait, and say for what.

Training holds no socket and cannot stall the link; carrier.py has the thread that does. A waiting call polls
`leave_requested`. The calls may be made from several threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path

from transport.protocol import (
    PROTOCOL,
    Committed,
    CurveKeys,
    Evaluated,
    Hello,
    Leave,
    Leaving,
    LinkLost,
    Over,
    Ready,
    RefusedByHub,
    Reopened,
    Report,
    Round,
    RunOver,
    RunURL,
    SessionRenewed,
    TransportError,
    Welcome,
)
from transport.transfer import CHUNK, MAX_OBJECT, MIN_FRAGMENT, ChunkBuffer, ChunkFile, Download, Upload
from transport.wire import Bandwidth, DealerWire, PeerWire, RateLimits

from .aggregator_orders import AggregatorOrders
from .connection_manager import ConnectionManager
from .peer_state import PeerState, SessionState
from .stop_request import StopRequest

GREETING_S = 20.0  # a hub that takes connections may take this long to say Welcome
# seconds after the wish to leave, 25 s in all with the goodbye:
LEAVE_S = 15.0  # until an exchange in flight must be done
HANDOFF_S = 21.0  # until what this peer hands over must be at the hub
HASTE_S = 5.0  # that a legacy is meant to take; more only where the uplink has become slower than it was
RENEWED = "the hub gave this peer a new session; work not delivered before is void"
LOST_S = 2.0  # without a connection, before anybody is told
POLL_S = 0.05  # how often a waiting call looks at `leave_requested`


class PeerLink:
    """A peer's link to its hub.

    connect(); fetch() what is lacking; ready(round, fingerprint); then next_round() and exchange() in turn,
    until next_round gives Over; leave(). Every call may raise SessionRenewed once: what was not delivered is
    void then; catch up to `link.welcome.round`, say ready(), go on with next_round().
    """

    def __init__(
        self,
        url: RunURL,
        name: str,
        hardware: str = "",
        versions: dict[str, str] | None = None,
        *,
        patience: float = 600.0,  # seconds a lost hub is dialled before LinkLost
        flows: int = 4,  # TCP connections for bulk: one alone cannot fill a long pipe
        bandwidth: Bandwidth = Bandwidth(),  # noqa: B008 - frozen; what this peer may use, all connections
        keys: CurveKeys | None = None,
        alone: bool = True,  # no other process with these keys goes by this name
        owns: bool = False,  # this peer can own shards (owning.py)
        reachable: str = "",  # where others reach it: the "host:port" of its door
        wire: PeerWire | None = None,
        buckets: RateLimits | None = None,  # in the place of bandwidth: another link's
        least: int = MIN_FRAGMENT,  # bytes of a piece of bulk
        told: Callable[[str], None] = lambda _: None,  # hears of a connection that is lost, and back
    ) -> None:
        self.url = url
        self.leave_requested = StopRequest()  # set it, from a signal handler too: waiting calls end
        hello = Hello(PROTOCOL, url.token, url.run, name, hardware, versions or {}, alone, owns, reachable)
        state = PeerState(hello)
        wire = wire or DealerWire(url.host, url.port, url.key, keys)
        self.buckets = buckets or RateLimits(bandwidth)
        self._carrier = ConnectionManager(wire, state, flows, patience, url.address, self.buckets, least)
        self._changed, self._state, self._bulk = self._carrier.changed, state, self._carrier.bulk
        self._session = 1  # how many sessions the caller knows of
        self.orders = AggregatorOrders(self._carrier, partial(self._wait, timeout=None), self.leave_requested)
        self._told, self._patience = told, patience
        self._lost_at: float | None = None  # since when there is no connection
        self._lost_told = ""  # what was said of that
        self._uplink = 0.0  # bytes a second, as the last packet went up; 0: none did
        self.upload_s = 0.0  # seconds that took, or for which it was waited in vain
        self._cap = bandwidth.up or inf  # which lets a small packet pass at once

    # ---- what this peer knows ------------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome:
        """The newest one: of the present session, with the round the run was at when it began."""
        assert self._state.welcome is not None, "connect first"
        return self._state.welcome

    @property
    def name(self) -> str:
        """The name the hub gave this peer."""
        return self.welcome.name

    @property
    def lost(self) -> bool:
        """Was the hub given up, or has it sent this peer away?"""
        return self._carrier.broken is not None or self._state.refused is not None

    @property
    def newest_round(self) -> int:
        """The newest committed round that this peer has heard of; -1: none."""
        return self._state.newest

    @property
    def bytes_up(self) -> int:
        """Sent so far, all connections, ZMTP and CURVE framing included."""
        return self._carrier.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._carrier.bytes_down

    # ---- calls that wait -----------------------------------------------------------------------------------

    def connect(self, timeout: float = 0.0, greeting_s: float = GREETING_S) -> Welcome:
        """Dial, greet, be welcomed. While the hub is unreachable go on dialling for `timeout` seconds; where
        the run's host is asked first, wait for the answer.

        Raises Unreachable, which says what failed, RefusedByHub, Leaving.
        """
        self._carrier.start(time.monotonic() + timeout)
        try:
            greeted = timeout + greeting_s
            self._wait("the hub's welcome", lambda: bool(self._state.waits or self._state.welcome), greeted)
            if self._state.welcome is None:
                self._told(self._state.waits)
                self._wait("the host's approval", lambda: self._state.welcome is not None, None)
        except TransportError:
            self.close()
            raise
        return self.welcome

    def fetch(self, name: str, sha256: str = "") -> bytes:
        """The object `name`.

        `sha256` (hex) is checked where given, else the hub's own where it knows one. Raises KeyError where
        the hub has no such object, ProtocolError where a checksum is wrong, Leaving, SessionRenewed, RunOver,
        LinkLost.
        """
        download = self.begin(name, sha256)
        try:
            return self.finish(download)
        finally:
            self.forget(download)

    def begin(self, name: str, sha256: str = "", most: int = MAX_OBJECT) -> Download:
        """Begin to fetch the object `name`, to `finish` it later. What does not finish, `forget`."""

        def open_sink(size: int, digest: bytes) -> ChunkBuffer:
            return ChunkBuffer(size, bytes.fromhex(sha256) or digest, CHUNK, most)

        return self._begin(name, lambda: self._bulk.fetch(name, open_sink), ahead_will_do=not sha256)

    def finish(self, download: Download, tick: Callable[[], None] = lambda: None) -> bytes:
        """Wait for what `begin` began, calling `tick` now and then. Raises as `fetch`; after SessionRenewed
        it may be called again."""
        self._finished(download, tick)
        assert isinstance(download.sink, ChunkBuffer)
        self.forget(download)
        return download.sink.finish()

    def begin_file(self, name: str, to: Path, size: int, hashes: bytes) -> Download:
        """Begin to fetch the object `name` into the file `to`, to `finish_file` it later.

        Each MiB is checked against `hashes` (chunks.py) as it comes. What is at `to` or `to`.part already,
        from an earlier attempt or damaged since, is read and checked first, and only what is wrong is fetched
        (`Download.came` counts it). What is right stays, whatever goes wrong here. Raises Leaving, OSError.
        """
        sink = ChunkFile(to, size, hashes, CHUNK)
        try:
            sink.look(self.leave_or_go_on)
            return self._begin(name, lambda: self._bulk.fill(name, sink), ahead_will_do=False)
        except BaseException:
            sink.close()
            raise

    def finish_file(self, download: Download, tick: Callable[[], None] = lambda: None) -> Path:
        """Wait for what `begin_file` began, calling `tick` now and then. Raises as `fetch`, and OSError (a
        full disk); after SessionRenewed it may be called again."""
        self._finished(download, tick)
        assert isinstance(download.sink, ChunkFile)
        self.forget(download)
        return download.sink.finish()

    def forget(self, *downloads: Download) -> None:
        """These are not wanted any more, or finished; what of a file is here stays."""
        with self._changed:
            for download in downloads:
                if self._bulk.downloads.get(download.name) is download:
                    self._bulk.forget(download.name)
                if isinstance(download.sink, ChunkFile):
                    download.sink.close()

    def leave_or_go_on(self) -> None:
        """For long work between calls: raises Leaving where this peer was asked to leave."""
        if self.leave_requested.is_set():
            raise Leaving("asked to leave")

    def _finished(self, download: Download, tick: Callable[[], None]) -> None:
        """Wait until a download is done. Raises why it cannot be."""
        while not download.done:
            self._wait(f"the object {download.name}", lambda: download.done, 0.25, give_up=False)
            tick()
        if download.refused is not None:
            with self._changed:
                self._check()  # a lease of an old session is nobody's fault
            raise KeyError(f"{download.name}: {download.refused}")
        if download.error is not None:
            raise download.error

    def _begin(self, name: str, begin: Callable[[], Download], *, ahead_will_do: bool) -> Download:
        """The download of `name`: the one begun ahead, or a new one once no other thread fetches the same."""

        def free() -> bool:
            other = self._bulk.downloads.get(name)
            return other is None or other.ahead

        self._wait(f"another fetch of {name}", free, None)
        with self._changed:
            self._check()
            ahead = self._bulk.downloads.get(name)
            if ahead is not None and ahead_will_do:
                ahead.ahead = False
                return ahead
            download = begin()
            self._carrier.say()
            return download

    def ask_anew(self) -> Welcome:
        """Be welcomed once more: where the run is now, and the snapshots it offers. Raises as `fetch`."""
        old = self.welcome
        with self._changed:
            self._carrier.say(self._state.ask_anew(time.monotonic()))
        self._wait("the hub's welcome", lambda: self.welcome is not old, GREETING_S)
        return self.welcome

    def next_round(self) -> Round | Over:
        """Wait for the next round this peer is a member of. Over: the run is, or you asked to leave."""
        taken: list[Round] = []

        def there() -> bool:
            if not taken and (round := self._state.take_round()) is not None:
                taken.append(round)
            return bool(taken) or self._state.over is not None

        try:
            self._wait("the next round", there, None)
        except Leaving:
            return Over("asked to leave", False)
        if taken:
            return taken[0]
        assert self._state.over is not None
        return self._state.over

    def exchange(
        self, round: int, packet: bytes, report: Report, parts: Mapping[str, bytes] | None = None
    ) -> Committed:
        """Upload this peer's packet of `round`, wait until the round is durable. Look for your name in
        `accepted`: where it is not, the packet came too late and is to be taken back.

        `parts`: what owners other than the hub are to have of it, by their names; `packet` is then the rest,
        empty where the hub owns nothing.

        With `leave_requested` set it still waits LEAVE_S for the exchange in flight. Raises Reopened,
        RunOver, SessionRenewed, RefusedByHub, LinkLost, Leaving: is the packet at the hub?
        """
        rest = {f"update/{round}": packet} if packet else {}
        named = {f"part/{round}/{owner}": part for owner, part in (parts or {}).items()} | rest
        size, started = sum(map(len, named.values())), time.monotonic()
        uploads: list[Upload] = []
        with self._changed:
            self._check()
            if round not in self._state.commits and self._state.reopened is None:
                uploads = [self._upload(name, data) for name, data in named.items()]
            self._carrier.say(self._state.report(report))
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
                    self._bulk.withdraw(name)
        with self._changed:
            if round in self._state.commits:
                return self._state.commits[round]
            if self._state.over is not None:
                raise RunOver.of(self._state.over)
            again = self._state.take_reopened()
            assert again is not None
            raise Reopened(again)

    @property
    def room(self) -> int:
        """Bytes that a peer which was asked to leave can still hand over, as its uplink was; 0: not known."""
        left = self.leave_requested.at + HANDOFF_S - time.monotonic()
        return int(min(self._uplink, self._cap) * max(0.0, min(HASTE_S, left)))

    def hand_over(self, round: int, packet: bytes) -> bool | None:
        """Upload what this peer, x' at `round`, leaves to the others. False: the hub does not have it, for
        sure; None: who knows. Until HANDOFF_S after the wish to leave; raises as `exchange`, but Leaving.
        """
        return self.put(f"legacy/{round}", packet)

    def put(
        self, name: str, data: bytes, look: Callable[[Upload], None] = lambda upload: None
    ) -> bool | None:
        """Upload the object `name`, and wait until the hub has it, or says that it is not wanted; `look` may
        end that by raising. As `hand_over`."""
        with self._changed:
            self._check()
            upload = self._upload(name, data)
            self._carrier.say()

        def there() -> bool:
            look(upload)
            return upload.done is not None

        try:
            self._wait(f"the hub to take {name}", there, None, leave_s=HANDOFF_S)
        except Leaving:
            return upload.arrived
        finally:
            with self._changed:
                self._bulk.withdraw(name)
        return upload.arrived

    def _upload(self, name: str, data: bytes) -> Upload:
        return self._bulk.upload(name, data, hashlib.sha256(data).digest())

    # ---- calls that do not ---------------------------------------------------------------------------------

    def ready(self, round: int, fingerprint: int, holds: dict[str, str] | None = None) -> None:
        """Say that this peer holds x' of `round` and can be given work. `holds`: see messages.Ready."""
        with self._changed:
            self._check()
            self._carrier.say(self._state.ready(Ready(round, fingerprint, holds or {})))

    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None:
        """Say what x' of `round` loses on this part of the evaluation set."""
        with self._changed:
            self._check()
            self._carrier.say(self._state.evaluated(Evaluated(round, part, loss_sum, tokens)))

    def leave(self, reason: str, timeout: float = 2.0) -> None:
        """Say goodbye, wait until the hub has heard it (or for `timeout` seconds), and close."""
        with self._changed:
            if self._state.link in (SessionState.JOINED, SessionState.OVER) and self._carrier.alive:
                self._carrier.say(self._state.leave(Leave(reason)))
                self._changed.wait_for(lambda: self._state.parted or not self._carrier.connected, timeout)
        self.close()

    def close(self) -> None:
        """Drop the link. Without `leave` before, the hub takes this peer for lost."""
        self._carrier.close()

    def abandon(self) -> None:
        """Have every waiting call end at once, with LinkLost. For signal handlers: takes no lock."""
        self._carrier.closing = True

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
        """Wait until `there()`. Raises what makes that impossible; after `timeout` LinkLost, if `give_up`."""
        started = time.monotonic()
        if self.orders.waiting:  # the exchange in flight needs it to the end
            leave_s = HANDOFF_S
        with self._changed:
            sessions = self._state.sessions
            while not there():
                self._check()
                if self._state.sessions > sessions:  # another thread was told; what we wait for is void too
                    raise SessionRenewed(RENEWED)
                now = time.monotonic()
                if timeout is not None and now - started >= timeout:
                    if give_up:
                        raise LinkLost(f"waited {timeout:.0f} s for {what}")
                    return
                self._tell_of_link(now)
                if self.leave_requested.is_set() and (
                    now - self.leave_requested.at >= leave_s or not self._carrier.connected
                ):
                    raise Leaving(f"asked to leave while waiting for {what}")
                # everything else notifies; a signal handler that sets the flag must not take locks
                self._changed.wait(POLL_S)

    def _tell_of_link(self, now: float) -> None:
        """Say once that the connection is lost, if it is for a while, and once that it is back."""
        state, where, how_long = self._state, self.url.address, f"for up to {self._patience:.0f} s"
        if state.welcome is None or state.link not in (SessionState.OFFLINE, SessionState.GREETING):
            if self._lost_told:
                self._told(f"connected to {where} again")
            self._lost_at, self._lost_told = None, ""
        elif self._lost_at is None:
            self._lost_at = now
        elif now - self._lost_at >= LOST_S:
            lost = f"the connection to {where} is lost; dialling again, {how_long}"
            old = f"the hub at {where} is ignored: {state.replaced}; looking for the other, {how_long}"
            if self._lost_told != (said := old if state.replaced else lost):
                self._lost_told = said
                self._told(said)

    def _check(self) -> None:
        """Raise what the caller must know before anything else. Holds the lock."""
        carrier, state = self._carrier, self._state
        if carrier.broken is not None:
            raise carrier.broken
        if carrier.closing:
            raise LinkLost("the link is closed")
        if state.refused is not None:
            raise RefusedByHub(state.refused.code, state.refused.reason)
        if state.over is not None and not carrier.connected:
            raise RunOver.of(state.over)
        if state.sessions > self._session and not self.orders.waiting:
            self._session = state.sessions
            raise SessionRenewed(RENEWED)
