"""The peer's shell: a transport thread that keeps the link up, and calls for the training thread that wait on it.

Training holds no socket and cannot stall the link; a waiting call polls `leave_requested` and says what it waits for.
The calls may be made from several threads.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .bulk import CHUNK, BulkPeer
from .chunks import PartFile, Parts
from .errors import (
    Leaving,
    LinkLost,
    ProtocolError,
    RefusedByHub,
    SessionRenewed,
    TransportError,
    Unreachable,
)
from .keys import CurveKeys
from .messages import (
    PROTOCOL,
    Attach,
    Attached,
    Committed,
    Evaluated,
    Hello,
    Leave,
    Message,
    Over,
    Ready,
    Refused,
    Report,
    Round,
    Welcome,
    decode_to_peer,
    encode,
)
from .peer_state import Link, PeerState
from .sockets import DealerWire
from .url import RunURL
from .wire import HANDSHAKE_DOWN, HANDSHAKE_UP, Came, Down, PeerWire, Up, wire_size

CONTROL = 0
FIRST_RETRY, LAST_RETRY = 0.25, 4.0  # seconds between dials
GREETING_S = 20.0  # a hub that takes connections may take this long to say Welcome
STALLED_S = 20.0  # a bulk flow that owes an answer for this long is dialled anew
LEAVE_S = 20.0  # an exchange in flight may take this long once the peer wants to leave
Progress = Callable[[int, int], None]  # (bytes here, bytes in all)


class PeerLink:
    """A peer's link to its hub.

    link.connect() -> Welcome; link.fetch(...); link.ready(round, fingerprint); then in turn link.next_round() and
    link.exchange(...), until next_round gives Over; link.leave() or link.close() at the end.
    After SessionRenewed: what was not delivered is void; catch up to `link.welcome.round`, ready(), next_round().
    """

    def __init__(
        self,
        url: RunURL,
        name: str,
        hardware: str = "",
        versions: dict[str, str] | None = None,
        *,
        patience: float = 600.0,
        flows: int = 4,
        keys: CurveKeys | None = None,
        wire: PeerWire | None = None,
    ) -> None:
        self.url, self.patience = url, patience  # patience: seconds a lost hub is dialled before LinkLost
        self.leave_requested = threading.Event()  # set it (from a signal handler, too): the waiting calls end
        self.bytes_up = self.bytes_down = 0  # on the wire, all flows, ZMTP and CURVE framing included
        self._state = PeerState(Hello(PROTOCOL, url.token, url.run, name, hardware, versions or {}))
        self._bulk = BulkPeer()
        self._wire = wire or DealerWire(url.host, url.port, url.key, keys)
        self._flows = range(1, flows + 1)
        self._attached: set[int] = set()
        self._up: set[int] = set()
        self._dial_at: dict[int, float] = {}
        self._retry: dict[int, float] = {}
        self._give_up_at: float | None = None  # when a lost hub is given up
        self._error: Unreachable | None = None  # of the newest dial
        self._moved = 0.0  # when a bulk flow last brought something
        self._outbox: deque[Message] = deque()
        self._session = 0  # the session the caller knows of
        self._closing = False
        self._broken: TransportError | None = None
        self._changed = threading.Condition()  # guards everything above; notified on every change
        self._thread = threading.Thread(target=self._run, name="cocktail-link", daemon=True)

    # ---- for the training thread ---------------------------------------------------------------------------

    def connect(self, timeout: float = 0.0) -> Welcome:
        """Dial, greet, be welcomed. While the hub is unreachable go on dialling for `timeout` seconds.

        Raises Unreachable, which says what failed, or RefusedByHub, Leaving.
        """
        with self._changed:
            self._dial_at[CONTROL] = 0.0
            self._give_up_at = time.monotonic() + timeout
        self._thread.start()
        try:
            self._wait("the hub's welcome", lambda: self._state.welcome is not None, timeout + GREETING_S)
        except TransportError:
            self.close()
            raise
        return self.welcome

    @property
    def welcome(self) -> Welcome:
        """The newest one: of the present session, with the round the run was at when it began."""
        assert self._state.welcome is not None, "connect first"
        return self._state.welcome

    @property
    def name(self) -> str:
        return self.welcome.name

    @property
    def newest_round(self) -> int:
        """The newest committed round that this peer has heard of; -1: none."""
        return self._state.newest

    def fetch(
        self, name: str, progress: Progress | None = None, to: Path | None = None, sha256: str = ""
    ) -> bytes | Path:
        """The object `name`: its bytes, or the path `to` it was written to (resumed where an earlier call stopped).

        `sha256` (hex) is checked where given, the hub's own where it knows one. Raises KeyError where the hub has
        no such object, Leaving, LinkLost, SessionRenewed.
        """

        def open_sink(size: int, digest: bytes) -> Parts | PartFile:
            want = bytes.fromhex(sha256) or digest
            return Parts(size, want, CHUNK) if to is None else PartFile(to, size, want, CHUNK)

        self._wait(f"another fetch of {name}", lambda: name not in self._bulk.downloads, None)
        with self._changed:
            self._check()
            download = self._bulk.fetch(name, open_sink)
        self._wire.wake()
        told = (-1, -1)
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
            raise KeyError(f"{name}: {download.refused}")
        if download.error is not None:
            raise download.error
        assert download.sink is not None
        return download.sink.finish()  # hashes the whole in this thread, not in the link's

    def ready(self, round: int, fingerprint: int) -> None:
        """Say that this peer holds x' of `round` and can be given work."""
        with self._changed:
            self._check()
            self._outbox.extend(self._state.ready(Ready(round, fingerprint)))
        self._wire.wake()

    def next_round(self) -> Round | Over:
        """Wait for the next round this peer is a member of. Over: the run is, or `leave_requested` was set."""
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
        """Upload this peer's packet of `round`, wait until the round is durable. Look for your name in `accepted`:
        without it the packet came too late and is to be taken back.

        Raises RunOver, SessionRenewed, RefusedByHub, LinkLost, Leaving.
        """
        name, sha256 = f"update/{round}", hashlib.sha256(packet).digest()
        with self._changed:
            self._check()
            self._outbox.extend(self._state.report(report))
            if round not in self._state.commits:
                self._bulk.upload(name, packet, sha256)
        self._wire.wake()
        try:
            self._wait(
                f"the commit of round {round}",
                lambda: round in self._state.commits or self._state.over is not None,
                None,
                leave_s=LEAVE_S,
            )
        finally:
            with self._changed:
                self._bulk.forget(name)
        with self._changed:
            if round not in self._state.commits:
                assert self._state.over is not None
                raise RunOver(self._state.over.reason, self._state.over.finished)
            return self._state.commits[round]

    def evaluated(self, round: int, part: int, loss_sum: float, tokens: int) -> None:
        with self._changed:
            self._check()
            self._outbox.extend(self._state.evaluated(Evaluated(round, part, loss_sum, tokens)))
        self._wire.wake()

    def leave(self, reason: str, timeout: float = 2.0) -> None:
        """Say goodbye, wait until the hub has heard it (or for `timeout`), and close."""
        with self._changed:
            if self._state.link in (Link.JOINED, Link.OVER) and self._thread.is_alive():
                self._outbox.extend(self._state.leave(Leave(reason)))
                self._wire.wake()
                self._changed.wait_for(lambda: self._state.parted or CONTROL not in self._up, timeout)
        self.close()

    def close(self) -> None:
        """Drop the link. Without `leave` before, the hub takes this peer for lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._wire.wake()
            self._thread.join(5.0)

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
            while not there():
                self._check()
                now = time.monotonic()
                if timeout is not None and now - started >= timeout:
                    if give_up:
                        raise LinkLost(f"waited {timeout:.0f} s for {what}")
                    return
                if self.leave_requested.is_set():
                    leaving = now if leaving is None else leaving
                    if now - leaving >= leave_s:
                        raise Leaving(f"asked to leave while waiting for {what}")
                # the flag is set without notifying (a signal handler must not take locks), so look now and then
                self._changed.wait(0.05 if timeout is None else min(0.05, timeout))

    def _check(self) -> None:
        """Raise what the caller must know before anything else. Holds the lock."""
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise LinkLost("the link is closed")
        if self._state.refused is not None:
            raise RefusedByHub(self._state.refused.code, self._state.refused.reason)
        if self._state.over is not None and CONTROL not in self._up:
            raise RunOver(self._state.over.reason, self._state.over.finished)
        if self._state.sessions > max(1, self._session):
            self._session = self._state.sessions
            raise SessionRenewed("the hub gave this peer a new session; work not delivered before is void")

    # ---- the transport thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._turn()  # what was still to be said
        except Exception as error:  # our bug: those who wait must hear of it
            with self._changed:
                self._broken = LinkLost(f"the transport thread failed: {type(error).__name__}: {error}")
                self._changed.notify_all()
            raise
        finally:
            self._wire.close()

    def _turn(self) -> None:
        with self._changed:
            now = time.monotonic()
            self._keep_up(now)
            self._say()
            until = self._deadline()
        events = self._wire.poll(min(0.5, max(0.0, until - time.monotonic())))
        if events:
            with self._changed:
                now = time.monotonic()
                for event in events:
                    self._take(event, now)
                self._say()
                self._changed.notify_all()

    def _take(self, event: Up | Down | Came, now: float) -> None:
        flow = event.flow
        if isinstance(event, Up):
            self._up.add(flow)
            self._retry.pop(flow, None)
            self.bytes_up += HANDSHAKE_UP
            self.bytes_down += HANDSHAKE_DOWN
            if flow == CONTROL:
                self._give_up_at = self._error = None
                self._outbox.clear()  # said again as far as it matters
                self._outbox.extend(self._state.connected(now))
            else:
                self._send(flow, Attach(self.welcome.session))
        elif isinstance(event, Down):
            self._down(flow, event.error, now)
        else:
            self._came(event, now)

    def _down(self, flow: int, error: Unreachable | None, now: float) -> None:
        """A flow ended: dial again, a little later each time."""
        self._up.discard(flow)
        wait = self._retry.get(flow, 0.0 if error is None else FIRST_RETRY)
        self._retry[flow] = min(LAST_RETRY, max(FIRST_RETRY, 2 * wait))
        self._dial_at[flow] = now + wait * random.uniform(
            0.75, 1.25
        )  # a whole swarm comes back after a restart
        if flow == CONTROL:
            self._state.disconnected()
            self._error = error or self._error
            if self._give_up_at is None:
                self._give_up_at = now + self.patience
        elif flow in self._attached:
            self._attached.discard(flow)
            self._bulk.down(flow)

    def _came(self, event: Came, now: float) -> None:
        self.bytes_down += wire_size(event.frames)
        try:
            message = decode_to_peer(event.frames[0])
        except ProtocolError:
            self._state.ignored += 1
            return
        if event.flow == CONTROL:
            session = self._state.sessions
            self._outbox.extend(self._state.receive(message, now))
            if self._state.offer_again:
                self._state.offer_again = False
                self._bulk.offer_again()
            if isinstance(message, Welcome) and self._state.sessions != session:
                self._new_session(now)
            return
        self._moved = now
        if isinstance(message, Attached):
            self._attached.add(event.flow)
            self._bulk.up(event.flow, message.credit)
        elif isinstance(message, Refused):  # the session is over; the control connection will hear so too
            self._hang_up(event.flow, now + 1.0)
        else:
            self._bulk.receive(message, event.frames[1] if len(event.frames) > 1 else b"")

    def _new_session(self, now: float) -> None:
        """Bulk flows belong to a session: all are dialled for this one."""
        for flow in self._flows:
            self._hang_up(flow, now)
        for name in list(self._bulk.uploads):
            self._bulk.forget(name)

    def _hang_up(self, flow: int, dial_at: float) -> None:
        self._wire.hang_up(flow)
        self._down(flow, None, dial_at)
        self._dial_at[flow] = dial_at

    def _keep_up(self, now: float) -> None:
        """Dial what is due, give up what is dead."""
        state = self._state
        if state.link in (Link.GREETING, Link.JOINED) and now >= state.silent_until():
            self._hang_up(CONTROL, now)
        for flow in self._attached.copy():
            if self._bulk.pending and now >= self._moved + STALLED_S:
                self._hang_up(flow, now)
        for flow in [f for f, at in self._dial_at.items() if now >= at]:
            if flow == CONTROL or state.link is Link.JOINED:
                del self._dial_at[flow]
                if state.link is not Link.OVER:
                    self._wire.dial(flow)
        if (
            self._lost_at is not None
            and now >= self._lost_at + self.patience
            and self._broken is None
            and state.link is not Link.OVER
        ):
            if state.welcome is None:
                self._broken = self._error or Unreachable(
                    self.url.host, self.url.port, "tcp", f"{self.url.address} does not answer"
                )
            else:
                self._broken = LinkLost(
                    f"the hub at {self.url.address} has not answered for {self.patience:.0f} s"
                    + (f": {self._error}" if self._error else "")
                )
            self._changed.notify_all()

    def _say(self) -> None:
        """Send what is to be sent: control first, then chunks as far as credit and wire allow."""
        if CONTROL in self._up:
            while self._outbox:
                if not self._send(CONTROL, self._outbox[0]):
                    break
                self._outbox.popleft()
        if not self._bulk.pending:
            self._moved = time.monotonic()
        for out in self._bulk.outgoing():
            if not self._send(out.flow, out.message, out.payload):
                self._bulk.unsent(out)

    def _send(self, flow: int, message: Message, payload: memoryview | None = None) -> bool:
        frames: list[bytes | memoryview] = (
            [encode(message)] if payload is None else [encode(message), payload]
        )
        if not self._wire.send(flow, frames):
            return False
        self.bytes_up += wire_size(frames)
        return True

    def _deadline(self) -> float:
        times = [time.monotonic() + 0.5]
        times += [
            at for flow, at in self._dial_at.items() if flow == CONTROL or self._state.link is Link.JOINED
        ]
        if self._state.link in (Link.GREETING, Link.JOINED):
            times.append(self._state.silent_until())
        return min(times)
