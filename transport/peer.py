"""A peer's link to its hub, as the training thread sees it: calls that wait, and say for what.

Training holds no socket and cannot stall the link; carrier.py has the thread that does. A waiting call polls
`leave_requested`. The calls may be made from several threads.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .bandwidth import Bandwidth
from .bulk import CHUNK, Download, OpenSink
from .carrier import Carrier
from .chunks import PartFile, Parts
from .errors import Leaving, LinkLost, RefusedByHub, RunOver, SessionRenewed, TransportError
from .keys import CurveKeys
from .messages import PROTOCOL, Committed, Evaluated, Hello, Leave, Over, Ready, Report, Round, Welcome
from .peer_state import Link, PeerState
from .sockets import DealerWire
from .url import RunURL
from .wire import PeerWire

GREETING_S = 20.0  # a hub that takes connections may take this long to say Welcome
LEAVE_S = 20.0  # an exchange in flight may take this long once the peer wants to leave
RENEWED = "the hub gave this peer a new session; work not delivered before is void"
LOST_S = 2.0  # without a connection, before anybody is told
LOOK_S = 0.05  # how often a waiting call looks at `leave_requested`

Progress = Callable[[int, int], None]  # (bytes here, bytes in all)


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
        wire: PeerWire | None = None,
        told: Callable[[str], None] = lambda _: None,  # hears of a connection that is lost, and back
    ) -> None:
        self.url = url
        self.leave_requested = threading.Event()  # set it, from a signal handler too: waiting calls end
        state = PeerState(Hello(PROTOCOL, url.token, url.run, name, hardware, versions or {}))
        wire = wire or DealerWire(url.host, url.port, url.key, keys)
        self._carrier = Carrier(wire, state, flows, patience, url.address, bandwidth)
        self._changed, self._state, self._bulk = self._carrier.changed, state, self._carrier.bulk
        self._session = 1  # how many sessions the caller knows of
        self._told, self._patience = told, patience
        self._lost_at: float | None = None  # since when there is no connection
        self._lost_told = False

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

    @property
    def cut_off(self) -> bool:
        """Is there no connection to the hub, though the run is not known to be over?"""
        return self._state.over is None and not self._carrier.connected

    # ---- calls that wait -----------------------------------------------------------------------------------

    def connect(self, timeout: float = 0.0) -> Welcome:
        """Dial, greet, be welcomed. While the hub is unreachable go on dialling for `timeout` seconds.

        Raises Unreachable, which says what failed, RefusedByHub, Leaving.
        """
        self._carrier.start(time.monotonic() + timeout)
        try:
            self._wait("the hub's welcome", lambda: self._state.welcome is not None, timeout + GREETING_S)
        except TransportError:
            self.close()
            raise
        return self.welcome

    def fetch(
        self, name: str, progress: Progress | None = None, to: Path | None = None, sha256: str = ""
    ) -> bytes | Path:
        """The object `name`: its bytes, or the path `to` it was written to (resumed where an earlier call
        stopped).

        `sha256` (hex) is checked where given, else the hub's own where it knows one. Raises KeyError where
        the hub has no such object, ProtocolError where a checksum is wrong, OSError where the disk is full,
        Leaving, SessionRenewed, RunOver, LinkLost.
        """

        def open_sink(size: int, digest: bytes) -> Parts | PartFile:
            want = bytes.fromhex(sha256) or digest
            return Parts(size, want, CHUNK) if to is None else PartFile(to, size, want, CHUNK)

        download = self._begin(name, open_sink, ahead_will_do=to is None and not sha256)
        told = (0, 0)
        try:
            while not download.done:
                self._wait(f"the object {name}", lambda: download.done, 0.25, give_up=False)
                if progress is not None and download.progress != told:
                    told = download.progress
                    progress(*told)
        finally:
            with self._changed:
                self._bulk.forget(name)
                if download.sink is not None and not download.sink.map.whole:
                    download.sink.save()
        if download.refused is not None:
            with self._changed:
                self._check()  # a lease of an old session is nobody's fault
            raise KeyError(f"{name}: {download.refused}")
        if download.error is not None:
            raise download.error
        assert download.sink is not None
        return download.sink.finish()  # hashes a file in this thread, not in the link's

    def _begin(self, name: str, open_sink: OpenSink, *, ahead_will_do: bool) -> Download:
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
            download = self._bulk.fetch(name, open_sink)
            self._carrier.say()
            return download

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

    def exchange(self, round: int, packet: bytes, report: Report) -> Committed:
        """Upload this peer's packet of `round`, wait until the round is durable. Look for your name in
        `accepted`: where it is not, the packet came too late and is to be taken back.

        With `leave_requested` set it still waits LEAVE_S for the exchange in flight. Raises RunOver,
        SessionRenewed, RefusedByHub, LinkLost, Leaving.
        """
        name, sha256 = f"update/{round}", hashlib.sha256(packet).digest()
        with self._changed:
            self._check()
            if round not in self._state.commits:
                self._bulk.upload(name, packet, sha256)
            self._carrier.say(self._state.report(report))

        def there() -> bool:
            return round in self._state.commits or self._state.over is not None

        try:
            self._wait(f"the commit of round {round}", there, None, leave_s=LEAVE_S)
        finally:
            with self._changed:
                self._bulk.forget(name)
        with self._changed:
            if round not in self._state.commits:
                assert self._state.over is not None
                raise RunOver(self._state.over.reason, self._state.over.finished)
            return self._state.commits[round]

    # ---- calls that do not ---------------------------------------------------------------------------------

    def ready(self, round: int, fingerprint: int) -> None:
        """Say that this peer holds x' of `round` and can be given work."""
        with self._changed:
            self._check()
            self._carrier.say(self._state.ready(Ready(round, fingerprint)))

    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None:
        """Say what x' of `round` loses on this part of the evaluation set."""
        with self._changed:
            self._check()
            self._carrier.say(self._state.evaluated(Evaluated(round, part, loss_sum, tokens)))

    def leave(self, reason: str, timeout: float = 2.0) -> None:
        """Say goodbye, wait until the hub has heard it (or for `timeout` seconds), and close."""
        with self._changed:
            if self._state.link in (Link.JOINED, Link.OVER) and self._carrier.alive:
                self._carrier.say(self._state.leave(Leave(reason)))
                self._changed.wait_for(lambda: self._state.parted or not self._carrier.connected, timeout)
        self.close()

    def close(self) -> None:
        """Drop the link. Without `leave` before, the hub takes this peer for lost."""
        self._carrier.close()

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
        started, leaving = time.monotonic(), None
        with self._changed:
            sessions = self._state.sessions
            while not there():
                self._check()
                if (
                    self._state.sessions > sessions
                ):  # told to another thread already; what we wait for is void too
                    raise SessionRenewed(RENEWED)
                now = time.monotonic()
                if timeout is not None and now - started >= timeout:
                    if give_up:
                        raise LinkLost(f"waited {timeout:.0f} s for {what}")
                    return
                self._tell_of_link(now)
                if self.leave_requested.is_set():
                    leaving = now if leaving is None else leaving
                    if now - leaving >= leave_s or not self._carrier.connected:
                        raise Leaving(f"asked to leave while waiting for {what}")
                # everything else notifies; a signal handler that sets the flag must not take locks
                self._changed.wait(LOOK_S)

    def _tell_of_link(self, now: float) -> None:
        """Say once that the connection is lost, if it is for a while, and once that it is back."""
        if self._carrier.connected or self._state.welcome is None:
            if self._lost_told:
                self._told(f"connected to {self.url.address} again")
            self._lost_at, self._lost_told = None, False
        elif self._lost_at is None:
            self._lost_at = now
        elif not self._lost_told and now - self._lost_at >= LOST_S:
            self._lost_told = True
            where, how_long = self.url.address, f"{self._patience:.0f} s"
            self._told(f"the connection to {where} is lost; dialling again, for up to {how_long}")

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
            raise RunOver(state.over.reason, state.over.finished)
        if state.sessions > self._session:
            self._session = state.sessions
            raise SessionRenewed(RENEWED)
