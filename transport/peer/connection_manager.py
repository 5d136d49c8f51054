"""The peer's transport thread: keeps its connections up and sends what the state machines return.

A connection is a *flow*: flow 0 carries control messages, the others bulk. All state is guarded by `changed`
and changes are notified on it. The thread never holds that lock while it waits for the wire.

The bounds of the objects that a peer fetches are known before a byte is kept, whatever the sender says.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Protocol

from transport.protocol import (
    LinkLost,
    ProtocolError,
    RunURL,
    TransportError,
    Unreachable,
    decode_to_peer,
    encode,
    messages,
)
from transport.transfer import DIGEST, MIN_FRAGMENT, ChunkBuffer, PeerTransfers, count_blocks
from transport.wire import (
    HANDSHAKE_DOWN,
    HANDSHAKE_UP,
    Bandwidth,
    Connected,
    Disconnected,
    PeerWire,
    RateLimits,
    Received,
    routes_to,
    wire_size,
)

from .peer_state import PeerState, SessionState

log = logging.getLogger(__name__)

CONTROL = 0  # the flow of control messages
FIRST_RETRY, LAST_RETRY = 0.25, 4.0  # seconds between dials
PREFETCHED = 4  # objects fetched before the training thread asks for them
STALLED_S = 10.0  # a bulk flow that owes an answer for this long is dialled anew
# After a silence of this length TCP waits up to as long again before it retries. Dialling anew is quicker and
# costs a window at most: done when the control connection was as silent, or another flow is not.
BACKED_OFF_S = 2.5
# Who let this peer wait is about to be the hub, and back at its port within the second time.
TAKES_OVER_RETRY, TAKES_OVER_S = 0.5, 15.0
LEASE_S = 1.0  # for which the packet of a round waits for the next lease
LOOK_S = 1.0  # of silence, after which the kernel is asked whether bytes still move
OF_SAMPLES = "so many samples, of at most the recipe's max_length"
# Beginnings of the names of all objects that may be fetched, each with the reason of its bound; extensions
# have rows of their own. A name without a row cannot be fetched.
BOUNDS = {
    "lease/": OF_SAMPLES,
    "packet/": "the recipe's compression of a round's sample",
    "packets/": "the recipe's compression of these rounds' samples",
    "eval": "so many samples as a run may evaluate, of at most the recipe's max_length",
    "base/": "the size that the run has announced",
    "snapshot/": "the size that the run has announced",
    "hashes/": "32 bytes for each MiB of the file",
}


def bound_of(name: str, of_extensions: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return why an object cannot be longer than it may be. Raises KeyError for a name without a row."""
    for prefix, reason in chain(BOUNDS.items(), of_extensions.items()):
        if name == prefix or (prefix.endswith("/") and name.startswith(prefix)):
            return reason
    raise KeyError(f"{name} is no object that a peer fetches")


def hashes_size(size: int) -> int:
    """Return the bytes of the hashes of a file of `size` bytes."""
    return DIGEST * count_blocks(size)


class SizeBounds(Protocol):
    """Bounds objects of a run by its recipe and its model. All methods return bytes."""

    def lease(self, opened: messages.Round) -> int:
        """Bound the lease of a round. Raises ProtocolError where the round is none that this run can have."""

    def packet(self, round: int) -> int:
        """Bound the aggregate of a round."""


@dataclass(frozen=True)
class LinkLimits:
    """Limits of one link; all of them are local choices of this machine."""

    patience: float = 600.0  # seconds a lost hub is dialled before LinkLost
    flows: int = 4  # TCP connections for bulk: one alone cannot fill a long pipe
    bandwidth: Bandwidth = Bandwidth()  # noqa: RUF009 - frozen; of all connections together
    min_fragment: int = MIN_FRAGMENT  # bytes of bulk in one message


@dataclass(frozen=True)
class HubPart:
    """The chunks of a packet that the hub sends to this peer; the others come into `sink` from elsewhere."""

    sink: ChunkBuffer
    chunks: Iterable[int]


class Bytes(NamedTuple):
    """The bytes that a connection had carried at a time, as the kernel counts."""

    at: float
    sent: int
    came: int


class ConnectionManager:
    """One peer's connections to its hub, and the thread that serves them."""

    def __init__(
        self, wire: PeerWire, state: PeerState, url: RunURL, limits: LinkLimits, rate_limits: RateLimits
    ) -> None:
        self.state, self.transfers = state, PeerTransfers(limits.min_fragment)
        self.changed = threading.Condition()
        self.broken: TransportError | None = None  # why this link has failed for good
        self.closing = False
        self.bytes_up = self.bytes_down = 0  # on the wire, ZMTP and CURVE framing included
        self._up_bucket, self._down_bucket = rate_limits.up, rate_limits.down
        self._wire, self._patience = wire, limits.patience
        self.url = self._target = url  # of the hub; where it is dialled now
        self._flows = range(1, limits.flows + 1)
        self._up: set[int] = set()
        # what the hub sends of a packet just committed; None: all of it. Called in this thread. If it is None
        # itself, packets are not prefetched.
        self.part_of: Callable[[messages.Committed], HubPart | None] | None = lambda _: None
        self.bounds: SizeBounds | None = None  # of the run's objects; without them nothing is prefetched
        # With rounds in flight a lease is needed at once and a packet is not. On the hub's line leases would
        # wait behind the packets of all peers, so these are asked for when the lease is here.
        self.leases_first = False
        self._dial_at: dict[int, float] = {CONTROL: 0.0}
        self._retry: dict[int, float] = {}
        self._error: Unreachable | None = None  # of the newest dial
        self._waits_there = False  # on the control connection, a place that is no hub yet
        self._stays_until = 0.0  # the place that let it wait is dialled until then, and not the hub
        self._give_up_at: float | None = None
        self._heard_at: dict[int, float] = {}  # when a flow last received, or began to wait for an answer
        self._bulk_heard_at = 0.0  # when any bulk flow last received
        self._crossed: dict[int, Bytes] = {}  # of a flow's connection, when it was last looked at
        self._attach_sent_at: dict[int, float] = {}  # when a bulk flow sent Attach
        self._outbox: deque[messages.Message] = deque()
        self.away_s, self._turned = 0.0, time.time()  # longest time between two turns, by the wall clock
        self._thread = threading.Thread(target=self._run, name="cocktail-link", daemon=True)

    # ---- called by the threads that use the link -----------------------------------------------------------

    def start(self, give_up_at: float) -> None:
        self._give_up_at = give_up_at
        self._thread.start()

    def say(self, said: Iterable[messages.Message] = ()) -> None:
        """Queue messages for the control connection and wake the thread. The caller holds the lock."""
        self._outbox.extend(said)
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
        except Exception as error:  # a bug of ours: the waiting calls must end
            log.debug("the transport thread failed", exc_info=True)
            with self.changed:
                self.broken = LinkLost(f"the transport thread failed: {type(error).__name__}: {error}")
                self.changed.notify_all()
        finally:
            self._wire.close()

    def _turn(self) -> None:
        before, self._turned = self._turned, time.time()
        self.away_s = max(self.away_s, self._turned - before)
        with self.changed:
            self._maintain(time.monotonic())
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
            if isinstance(event.error, ProtocolError):
                self.broken = self.broken or event.error
            self._flow_down(event.flow, None if isinstance(event.error, ProtocolError) else event.error, now)
        elif len(event.frames) > 2:
            self.state.ignored += 1
        else:
            self._received(event, now)

    def _flow_up(self, flow: int, now: float) -> None:
        self._up.add(flow)
        self._heard_at[flow], self._crossed[flow] = now, Bytes(now, *self._wire.crossed(flow))
        self._retry.pop(flow, None)
        self._count(HANDSHAKE_UP, HANDSHAKE_DOWN, now)
        if flow == CONTROL:
            self._error = None
            if self.state.welcome is None:  # else only a Welcome counts: this may be a hub that was replaced
                self._give_up_at = None
            self._outbox.clear()  # the state machine repeats what still matters
            self._outbox.extend(self.state.connected(now))
            self._redial_silent(now)
        elif self.state.welcome is not None:
            self._attach_sent_at[flow] = now
            self._send(flow, messages.Attach(self.state.welcome.session))

    def _flow_down(self, flow: int, error: Unreachable | None, now: float) -> None:
        """Handle the end of a flow: dial again, a little later each time."""
        wait = self._retry.get(flow, 0.0 if error is None else FIRST_RETRY)
        self._retry[flow] = min(LAST_RETRY, max(FIRST_RETRY, 2 * wait))
        self._dial_at[flow] = now + wait * random.uniform(0.75, 1.25)  # a whole swarm reconnects at once
        self._up.discard(flow)
        if flow != CONTROL:
            self.transfers.down(flow)
            return
        if self._waits_there and error is None:
            self._stays_until = now + TAKES_OVER_S
        self._waits_there = False
        if now < self._stays_until:
            self._dial_at[flow] = now + TAKES_OVER_RETRY * random.uniform(0.5, 1.0)
        elif error is not None:
            self._dial_elsewhere()
        self.state.disconnected()
        self._error = error or self._error
        if self._give_up_at is None:
            self._give_up_at = now + self._patience

    def _received(self, event: Received, now: float) -> None:
        self._count(0, wire_size(event.frames), now)
        try:
            message = decode_to_peer(event.frames[0])
        except ProtocolError:
            self.state.ignored += 1
            return
        if event.flow != CONTROL:
            self._received_bulk(event, message, now)
            return
        if now >= self._heard_at[CONTROL] + BACKED_OFF_S:
            self._redial_silent(now)
        self._heard_at[CONTROL] = now
        try:
            most = self._most(message)
        except ProtocolError as error:
            self.broken = self.broken or error
            return
        sessions = self.state.sessions
        self._outbox.extend(self.state.receive(message, now))
        if isinstance(message, messages.Wait):
            self._waits_there = self._target is not self.url
        if self.state.link is SessionState.OFFLINE:  # it was a hub of an older term, or none
            elsewhere = self._dial_elsewhere()
            self._hang_up(CONTROL, now + (FIRST_RETRY if elsewhere else LAST_RETRY))
            return
        if isinstance(message, messages.Welcome):
            self._give_up_at = None
            if self._target is not self.url:  # that is the hub now
                self.url, self.state.elsewhere = self._target, None
                self._waits_there, self._stays_until = False, 0.0
            if self.state.sessions != sessions:
                self._new_session(now)
        if self.state.offer_again:
            self.state.offer_again = False
            self.transfers.offer_again()
        if isinstance(message, messages.Committed) and self.leases_first:
            self.transfers.packets_from = now + LEASE_S
        elif isinstance(message, messages.Round) and not message.samples:
            self.transfers.packets_from = 0.0
        if most is None:
            return
        if isinstance(message, messages.Round) and message.samples:
            self._prefetch(f"lease/{message.round}", most)
        elif (
            isinstance(message, messages.Committed)
            and self.part_of is not None
            and self.state.fetches(message.round)
        ):
            self._prefetch(f"packet/{message.round}", most, message.size, self.part_of(message))

    def _most(self, message: messages.Message) -> int | None:
        """Bound the lease of a round, or its packet; None: of no other message, or not yet. Raises
        ProtocolError where no run of this recipe has such a round or packet."""
        if self.bounds is None:
            return None
        if isinstance(message, messages.Round):
            return self.bounds.lease(message)
        if not isinstance(message, messages.Committed):
            return None
        most = self.bounds.packet(message.round)
        if message.size > most:
            said = f"packet/{message.round} is announced with {message.size:,} bytes"
            raise ProtocolError(f"{said}; it has {most:,} at most: {bound_of('packet/')}")
        return most

    def _prefetch(self, name: str, most: int, size: int = 0, part: HubPart | None = None) -> None:
        """Fetch an object, or a part, before the training thread asks for it, to save it a round trip."""
        if name in self.transfers.downloads:
            return
        ahead = [d for d in self.transfers.downloads.values() if d.prefetched]
        if len(ahead) >= PREFETCHED:
            self.transfers.forget(ahead[0].name)
        if part is None:
            self.transfers.fetch(name, ChunkBuffer, most, size, prefetched=True)
        else:
            self.transfers.fetch_chunks(name, part.sink, part.chunks, prefetched=True)

    def _received_bulk(self, event: Received, message: messages.Message, now: float) -> None:
        # pings wait behind the chunks of all peers in the hub's line: who sends those is not silent
        self._heard_at[event.flow] = self._bulk_heard_at = self.state.heard = now
        if isinstance(message, messages.Attached):
            self.transfers.up(event.flow, message.credit, now - self._attach_sent_at[event.flow], now)
        elif isinstance(message, messages.Refused):  # the session is over; the control connection is told too
            self._hang_up(event.flow, now + 1.0)
        else:
            if isinstance(message, messages.Data):  # it was charged when it was asked for
                self._down_bucket.take(-self.transfers.expected(message.name, message.index), now)
            self.transfers.receive(message, event.frames[1] if len(event.frames) > 1 else b"", now)

    def _new_session(self, now: float) -> None:
        """Drop the bulk flows and uploads of the old session. Downloads go on: objects belong to the run."""
        for flow in self._flows:
            self._hang_up(flow, now)
        for name in list(self.transfers.uploads):
            self.transfers.withdraw(name)
        for name in [d.name for d in self.transfers.downloads.values() if d.prefetched]:
            self.transfers.forget(name)

    def _hang_up(self, flow: int, dial_at: float) -> None:
        self._wire.hang_up(flow)
        self._flow_down(flow, None, dial_at)
        self._dial_at[flow] = dial_at

    def _dial_elsewhere(self) -> bool:
        """Dial the other place next, if the hub was dialled; the hub, if it was not. False: there is none."""
        self._waits_there, self._stays_until = False, 0.0
        elsewhere, target = self.state.elsewhere, self.url
        if self._target is self.url and elsewhere is not None:
            target = self.url.at(elsewhere.place, elsewhere.key)
            elsewhere.dialled()
        if target is self._target:
            return False
        self._target = target
        self._wire.aim(routes_to(target), target.key)
        for flow in self._up - {CONTROL}:  # they lead to the other one
            self._hang_up(flow, time.monotonic())
        return True

    def _redial_silent(self, now: float) -> None:
        """Redial, after a silence, the bulk flows that were silent as well and owe an answer."""
        for flow in self._up - {CONTROL}:
            if self.transfers.owes(flow) and now >= self._heard_at[flow] + BACKED_OFF_S:
                self._hang_up(flow, now)

    # ---- time ----------------------------------------------------------------------------------------------

    def _maintain(self, now: float) -> None:
        """Dial the flows that are due, hang up dead ones, and give up after `patience`."""
        self._look(now)
        link = self.state.link
        if link in (SessionState.GREETING, SessionState.JOINED) and now >= self.state.silent_until():
            # A network that dropped this connection dropped the others; alone they would wait for STALLED_S.
            self._dial_elsewhere()
            for flow in sorted(self._up | {CONTROL}):
                self._hang_up(flow, now)
        for flow in self._up - {CONTROL}:
            overtaken = self._bulk_heard_at >= self._heard_at[flow] + BACKED_OFF_S
            if self.transfers.owes(flow) and (overtaken or now >= self._heard_at[flow] + STALLED_S):
                self._hang_up(flow, now)
        for flow in [f for f, at in self._dial_at.items() if now >= at and self._wanted(f)]:
            del self._dial_at[flow]
            self._wire.dial(flow)
        tried = self.state.welcome is not None or self._error is not None
        more = self._error.patience if self._error is not None else 0.0
        if (
            self._give_up_at is not None
            and now >= self._give_up_at + more
            and tried
            and link is not SessionState.OVER
        ):
            self.broken = self.broken or self._failure()
            self.changed.notify_all()

    def _look(self, now: float) -> None:
        """Hear a flow whose bytes still move: on a thin line a single message may take minutes. The hub is
        heard by what comes alone: the system of a hub that hangs acknowledges what it is sent."""
        for flow in [f for f in self._up if now >= self._heard_at[f] + LOOK_S]:
            seen, before = Bytes(now, *self._wire.crossed(flow)), self._crossed[flow]
            if before.at < self._heard_at[flow]:  # what has come since came with messages: those were heard
                self._crossed[flow] = seen
            elif seen.sent + seen.came > before.sent + before.came:
                self._crossed[flow] = seen
                self._heard_at[flow] = now
                self._bulk_heard_at = now if flow != CONTROL else self._bulk_heard_at
                self.state.heard = now if seen.came > before.came else self.state.heard

    def _wanted(self, flow: int) -> bool:
        """Return True for a flow to dial: control always, one bulk flow, more once its window is full."""
        if self.state.link in (SessionState.OVER, SessionState.REFUSED):
            return False
        return flow == CONTROL or (
            self.state.link is SessionState.JOINED and (flow == 1 or self.transfers.saturated)
        )

    def _failure(self) -> TransportError:
        if self.state.welcome is None and self._error is not None:
            return self._error
        why = f": {self.state.replaced or self._error}" if self.state.replaced or self._error else ""
        return LinkLost(f"the hub at {self.url.address} has not answered for {self._patience:.0f} s{why}")

    def _deadline(self) -> float:
        now = time.monotonic()
        times = [now + 0.5, *(at for flow, at in self._dial_at.items() if self._wanted(flow))]
        if self.state.link in (SessionState.GREETING, SessionState.JOINED):
            times.append(self.state.silent_until())
        times += [at for bucket in (self._up_bucket, self._down_bucket) if (at := bucket.open_at(now)) > now]
        return min(times)

    # ---- out -----------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        """Send control messages, then chunks as far as window, rate limit and wire allow."""
        while CONTROL in self._up and self._outbox and self._send(CONTROL, self._outbox[0]):
            self._outbox.popleft()
        now = time.monotonic()
        for flow in self._up - {CONTROL}:
            if not self.transfers.owes(flow):
                self._heard_at[flow] = now
        for out in self.transfers.outgoing(self._up_bucket.level(now), self._down_bucket.level(now), now):
            if not self._send(out.flow, out.message, out.payload):
                self.transfers.unsent(out)
            else:
                self._down_bucket.take(out.answer, now)

    def _send(self, flow: int, message: messages.Message, payload: memoryview | None = None) -> bool:
        frames: list[bytes | memoryview] = [encode(message)]
        if payload is not None:
            frames.append(payload)
        if not self._wire.send(flow, frames):
            return False
        self._count(wire_size(frames), 0, time.monotonic())
        return True

    def _count(self, up: int, down: int, now: float) -> None:
        """Count bytes on the wire of every kind, and charge them to the rate limits."""
        self.bytes_up += up
        self.bytes_down += down
        self._up_bucket.take(up, now)
        self._down_bucket.take(down, now)
