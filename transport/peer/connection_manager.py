"""The peer's transport thread: keeps its connections up, and carries what the machines say.

Everything here is guarded by `changed`, and changes are notified on it. The thread holds the lock for as long
as the machines need, never while it waits for the wire.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable

from transport.protocol import (
    Attach,
    Attached,
    Committed,
    Data,
    LinkLost,
    Message,
    ProtocolError,
    Refused,
    Round,
    TransportError,
    Unreachable,
    Welcome,
    decode_to_peer,
    encode,
)
from transport.transfer import CHUNK, MIN_FRAGMENT, ChunkBuffer, PeerTransfers
from transport.wire import (
    HANDSHAKE_DOWN,
    HANDSHAKE_UP,
    Connected,
    Disconnected,
    PeerWire,
    RateLimits,
    Received,
    wire_size,
)

from .peer_state import PeerState, SessionState

log = logging.getLogger(__name__)

CONTROL = 0  # the flow of control messages; 1 and up are bulk
FIRST_RETRY, LAST_RETRY = 0.25, 4.0  # seconds between dials
AHEAD = 4  # objects fetched before anybody asks for them
STALLED_S = 10.0  # a bulk flow that owes an answer for this long is dialled anew
# After a silence of this length TCP waits up to as long again before it tries once more. Dialling anew is
# quicker, and costs a window at most: where the control connection was as silent, or another flow is not.
BACKED_OFF_S = 2.5


class ConnectionManager:
    """One peer's connections to its hub."""

    def __init__(
        self,
        wire: PeerWire,
        state: PeerState,
        flows: int,
        patience: float,
        address: str,
        buckets: RateLimits,
        least: int = MIN_FRAGMENT,  # bytes of a piece of bulk
    ) -> None:
        self.state, self.bulk = state, PeerTransfers(least)
        self.changed = threading.Condition()
        self.patience = patience  # seconds a lost hub is dialled before that is called hopeless
        self.broken: TransportError | None = None  # why nothing more will come of this link
        self.closing = False
        self.bytes_up = self.bytes_down = 0  # on the wire, ZMTP and CURVE framing included
        self._may_send, self._may_ask = buckets.up, buckets.down
        self._wire, self._address = wire, address
        self._flows = range(1, flows + 1)
        self._up: set[int] = set()
        self._dial_at: dict[int, float] = {CONTROL: 0.0}
        self._retry: dict[int, float] = {}
        self._error: Unreachable | None = None  # of the newest dial
        self._give_up_at: float | None = None
        self._moved: dict[int, float] = {}  # when a flow last brought something, or began to owe it
        self._brought = 0.0  # when any bulk flow last brought something
        self._attached: dict[int, float] = {}  # when a bulk flow was attached
        self._outbox: deque[Message] = deque()
        self._thread = threading.Thread(target=self._run, name="cocktail-link", daemon=True)

    # ---- for the threads that use the link -----------------------------------------------------------------

    def start(self, give_up_at: float) -> None:
        self._give_up_at = give_up_at
        self._thread.start()

    def say(self, messages: Iterable[Message] = ()) -> None:
        """Send these when the control connection is up, and look at what bulk has to send. Holds the lock."""
        self._outbox.extend(messages)
        self._wire.wake()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def connected(self) -> bool:
        return CONTROL in self._up

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        if self._thread.is_alive():
            self._wire.wake()
            self._thread.join(5.0)
        elif not self._thread.ident:  # never started
            self._wire.close()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.closing:
                self._turn()
        except Exception as error:  # our bug: those who wait must hear of it
            log.debug("the transport thread failed", exc_info=True)
            with self.changed:
                self.broken = LinkLost(f"the transport thread failed: {type(error).__name__}: {error}")
                self.changed.notify_all()
        finally:
            self._wire.close()

    def _turn(self) -> None:
        with self.changed:
            self._keep_up(time.monotonic())
            self._send_all()
            until = self._deadline()
        events = self._wire.poll(min(0.5, max(0.0, until - time.monotonic())))
        if events:
            with self.changed:
                now = time.monotonic()
                for event in events:
                    self._take(event, now)
                self._send_all()
                self.changed.notify_all()

    def _take(self, event: Connected | Disconnected | Received, now: float) -> None:
        if isinstance(event, Connected):
            self._flow_up(event.flow, now)
        elif isinstance(event, Disconnected):
            self._flow_down(event.flow, event.error, now)
        else:
            self._came(event, now)

    def _flow_up(self, flow: int, now: float) -> None:
        self._up.add(flow)
        self._moved[flow] = now
        self._retry.pop(flow, None)
        self._count(HANDSHAKE_UP, HANDSHAKE_DOWN, now)
        if flow == CONTROL:
            self._error = None
            if self.state.welcome is None:  # else a connection is nothing yet: it may be to a hub of old
                self._give_up_at = None
            self._outbox.clear()  # what of it still matters, the machine says again
            self._outbox.extend(self.state.connected(now))
            self._line_is_back(now)
        elif self.state.welcome is not None:
            self._attached[flow] = now
            self._send(flow, Attach(self.state.welcome.session))

    def _flow_down(self, flow: int, error: Unreachable | None, now: float) -> None:
        """A flow ended: dial again, a little later each time."""
        wait = self._retry.get(flow, 0.0 if error is None else FIRST_RETRY)
        self._retry[flow] = min(LAST_RETRY, max(FIRST_RETRY, 2 * wait))
        self._dial_at[flow] = now + wait * random.uniform(0.75, 1.25)  # a whole swarm comes back at once
        self._up.discard(flow)
        if flow != CONTROL:
            self.bulk.down(flow)
            return
        self.state.disconnected()
        self._error = error or self._error
        if self._give_up_at is None:
            self._give_up_at = now + self.patience

    def _came(self, event: Received, now: float) -> None:
        self._count(0, wire_size(event.frames), now)
        try:
            message = decode_to_peer(event.frames[0])
        except ProtocolError:
            self.state.ignored += 1
            return
        if event.flow != CONTROL:
            self._came_in_bulk(event, message, now)
            return
        if now >= self._moved[CONTROL] + BACKED_OFF_S:
            self._line_is_back(now)
        self._moved[CONTROL] = now
        sessions = self.state.sessions
        self._outbox.extend(self.state.receive(message, now))
        if self.state.link is SessionState.OFFLINE:  # a hub of an older term
            self._hang_up(CONTROL, now + LAST_RETRY)
            return
        if isinstance(message, Welcome):
            self._give_up_at = None
            if self.state.sessions != sessions:
                self._new_session(now)
        if self.state.offer_again:
            self.state.offer_again = False
            self.bulk.offer_again()
        if self.state.reopened is message:  # what was cut for other owners is void
            for name in [n for n in self.bulk.uploads if n.startswith(("update/", "part/"))]:
                self.bulk.withdraw(name)
        if isinstance(message, Round) and message.samples:
            self._fetch_ahead(f"lease/{message.round}", 0)
        elif isinstance(message, Committed) and self.state.takes_part and not self.state.assembles:
            self._fetch_ahead(f"packet/{message.round}", message.size)

    def _fetch_ahead(self, name: str, size: int) -> None:
        """Begin to fetch what the training thread will ask for: it should not wait for another round trip."""
        if name in self.bulk.downloads:
            return
        ahead = [d for d in self.bulk.downloads.values() if d.ahead]
        if len(ahead) >= AHEAD:
            self.bulk.forget(ahead[0].name)
        self.bulk.fetch(name, chunk_buffer, size, ahead=True)

    def _came_in_bulk(self, event: Received, message: Message, now: float) -> None:
        self._moved[event.flow] = self._brought = now
        if isinstance(message, Attached):
            self.bulk.up(event.flow, message.credit, now - self._attached[event.flow], now)
        elif isinstance(message, Refused):  # the session is over; the control connection will hear so too
            self._hang_up(event.flow, now + 1.0)
        else:
            if isinstance(message, Data):  # taken into account when it was asked for
                self._may_ask.take(-self.bulk.expected(message.name, message.index), now)
            self.bulk.receive(message, event.frames[1] if len(event.frames) > 1 else b"", now)

    def _new_session(self, now: float) -> None:
        """Bulk flows and uploads belong to a session. Downloads go on: objects are the run's."""
        for flow in self._flows:
            self._hang_up(flow, now)
        for name in list(self.bulk.uploads):
            self.bulk.withdraw(name)
        for name in [d.name for d in self.bulk.downloads.values() if d.ahead]:
            self.bulk.forget(name)

    def _hang_up(self, flow: int, dial_at: float) -> None:
        self._wire.hang_up(flow)
        self._flow_down(flow, None, dial_at)
        self._dial_at[flow] = dial_at

    def _line_is_back(self, now: float) -> None:
        """After a silence: bulk flows that were silent as well and owe something are dialled anew."""
        for flow in self._up - {CONTROL}:
            if self.bulk.owes(flow) and now >= self._moved[flow] + BACKED_OFF_S:
                self._hang_up(flow, now)

    # ---- time ----------------------------------------------------------------------------------------------

    def _keep_up(self, now: float) -> None:
        """Dial what is due, hang up what is dead, see when it is hopeless."""
        link = self.state.link
        if link in (SessionState.GREETING, SessionState.JOINED) and now >= self.state.silent_until():
            # What swallowed this connection has swallowed the others; alone they would wait for STALLED_S.
            for flow in sorted(self._up | {CONTROL}):
                self._hang_up(flow, now)
        for flow in self._up - {CONTROL}:
            overtaken = self._brought >= self._moved[flow] + BACKED_OFF_S
            if self.bulk.owes(flow) and (overtaken or now >= self._moved[flow] + STALLED_S):
                self._hang_up(flow, now)
        for flow in [f for f, at in self._dial_at.items() if now >= at and self._wanted(f)]:
            del self._dial_at[flow]
            self._wire.dial(flow)
        tried = self.state.welcome is not None or self._error is not None
        if (
            self._give_up_at is not None
            and now >= self._give_up_at
            and tried
            and link is not SessionState.OVER
        ):
            self.broken = self.broken or self._hopeless()
            self.changed.notify_all()

    def _wanted(self, flow: int) -> bool:
        """Control always, one bulk flow in a session, more of them once that has all it may take."""
        if self.state.link in (SessionState.OVER, SessionState.REFUSED):
            return False
        return flow == CONTROL or (
            self.state.link is SessionState.JOINED and (flow == 1 or self.bulk.crowded)
        )

    def _hopeless(self) -> TransportError:
        if self.state.welcome is None and self._error is not None:
            return self._error
        why = f": {self.state.replaced or self._error}" if self.state.replaced or self._error else ""
        return LinkLost(f"the hub at {self._address} has not answered for {self.patience:.0f} s{why}")

    def _deadline(self) -> float:
        now = time.monotonic()
        times = [now + 0.5, *(at for flow, at in self._dial_at.items() if self._wanted(flow))]
        if self.state.link in (SessionState.GREETING, SessionState.JOINED):
            times.append(self.state.silent_until())
        times += [at for bucket in (self._may_send, self._may_ask) if (at := bucket.open_at(now)) > now]
        return min(times)

    # ---- out -----------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Control first, then chunks as far as credit and wire allow."""
        while CONTROL in self._up and self._outbox and self._send(CONTROL, self._outbox[0]):
            self._outbox.popleft()
        now = time.monotonic()
        for flow in self._up - {CONTROL}:
            if not self.bulk.owes(flow):
                self._moved[flow] = now
        for out in self.bulk.outgoing(self._may_send.level(now), self._may_ask.level(now), now):
            if not self._send(out.flow, out.message, out.payload):
                self.bulk.unsent(out)
            else:
                self._may_ask.take(out.answer, now)

    def _send(self, flow: int, message: Message, payload: memoryview | None = None) -> bool:
        frames: list[bytes | memoryview] = [encode(message)]
        if payload is not None:
            frames.append(payload)
        if not self._wire.send(flow, frames):
            return False
        self._count(wire_size(frames), 0, time.monotonic())
        return True

    def _count(self, up: int, down: int, now: float) -> None:
        """Bytes on the wire, of every kind: all of them are paid for."""
        self.bytes_up += up
        self.bytes_down += down
        self._may_send.take(up, now)
        self._may_ask.take(down, now)


def chunk_buffer(size: int, sha256: bytes) -> ChunkBuffer:
    return ChunkBuffer(size, sha256, CHUNK)
