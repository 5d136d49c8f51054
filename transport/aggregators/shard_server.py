"""A shard server: the members of a round upload their parts to it and fetch the packet of its shards. Where
the hub aggregates they fetch chunks of its packet that this peer passes on, as they arrive.

It speaks as much of the hub's protocol as PeerLink.put and fetch need: Hello, Attach, and bulk. Only members
of the run, as the hub names them, may connect: checked by key at the handshake and by name at Hello.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from transport.protocol import PACKET, PART, SHARD, ProtocolError, decode_to_hub, encode, messages, round_of
from transport.transfer import (
    ChunkBuffer,
    CompletedUpload,
    ConnectionRegistry,
    Inbox,
    ObjectSource,
    memory_source,
)
from transport.wire import GUARD_S, Bandwidth, Frames, HubWire, RateLimits, key_of, wire_size

log = logging.getLogger(__name__)

CREDIT = 32  # chunks under way for each session and direction
KEPT = 5  # rounds whose packet is served: members may have four in flight
PASSED = 4  # rounds whose packet is passed on: peers may be behind
EARLY, EARLY_S = 4096, 20.0  # requests that wait for their chunk, of all sessions, and how long
EARLY_OF_ONE = 8 * CREDIT  # of one session
EARLY_POLL_S = 0.01  # how often they are looked at
GONE = "it is not served here, or not any more"
QUIET_S = 3600.0  # no pings here: the hub watches over members


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


@dataclass(frozen=True)
class EarlyRequest:
    """A request for a chunk that this peer has not received yet."""

    conn: bytes
    session: str
    message: messages.Get
    until: float  # when it is refused


class ShardServer:
    """One aggregator's server. It starts before the handshake with the hub, which dials it; members are set
    later.

    Args:
        wire: binds the port; the names of its connections begin with proven keys.
    """

    def __init__(self, wire: HubWire, run: str) -> None:
        self.run, self.limit = run, 0  # limit: bytes of one part
        # called in the server's thread
        self.on_part: Callable[[int, str, bytes], None] = lambda round, name, part: None
        self.rate_limits = RateLimits(Bandwidth())  # the peer's own, once it has a link to its hub
        self.bytes_up = self.bytes_down = 0
        self.files: Mapping[str, Path] = {}  # objects that newcomers may fetch
        self.busy: Callable[[], bool] = lambda: False  # this peer's own updates go first
        self._newcomers: Mapping[str, str] = {}  # name -> key
        self._wire = wire
        self._members: dict[str, str] = {}  # name -> key
        self._round = 0  # parts of earlier rounds are refused
        self._served: dict[int, ObjectSource] = {}  # round -> the packet of the shards
        self._passed: dict[int, PassedPacket] = {}  # by round
        self._early: deque[EarlyRequest] = deque()  # for chunks that are not here yet
        self._waiting = Counter[str]()  # of `_early`, by session
        self._lacking: set[str] = set()  # members that lack the end of what the newest packet passes on
        self._sessions: dict[str, tuple[str, str]] = {}  # session -> name, key
        self._connections = ConnectionRegistry()
        self._inbox = Inbox(self._refuses)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="cocktail-shard-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wire.wake()
        self._thread.join(5.0)

    # ---- from the aggregator's thread: one assignment each -------------------------------------------------

    def opened(self, round: int, members: Mapping[str, str], limit: int) -> None:
        """Accept parts of this round from `members`: name -> key."""
        self._round, self._members, self.limit = round, dict(members), limit

    def serve(self, round: int, packet: bytes) -> None:
        """Serve the packet of this round."""
        kept = {r: source for r, source in self._served.items() if round - KEPT < r < round}
        self._served = kept | {round: memory_source(packet)}

    def pass_on(self, round: int, members: Mapping[str, str], packet: ChunkBuffer, chunks: range) -> None:
        """Serve these chunks of a packet to `members` (name -> key), each as soon as it is in the buffer."""
        self.opened(round, members, 0)
        kept = {r: passed for r, passed in self._passed.items() if r > round - PASSED}
        self._passed, self._lacking = kept | {round: PassedPacket(packet, chunks)}, set(members)

    def admit(self, newcomers: Mapping[str, str]) -> None:
        """Let these peers, name -> key, fetch files."""
        self._newcomers = newcomers

    def finish(self, timeout: float) -> None:
        """Wait until members have the newest packet that is passed on: then this server may be closed."""
        until = time.monotonic() + timeout
        while (
            self._thread.is_alive()
            and time.monotonic() < until
            and (self._lacking or any(map(self._wire.held, list(self._connections.owners))))
        ):
            time.sleep(EARLY_POLL_S)

    def knows(self, key: str) -> bool:
        """True if this key belongs to a member, or to a newcomer."""
        return key in self._members.values() or key in self._newcomers.values()

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        guard_at = 0.0  # when to check what connections hold
        waiting: deque[tuple[bytes, Frames]] = deque()  # messages that wait for the rate limits
        try:
            while not self._closing:
                idle = EARLY_POLL_S if self._early else GUARD_S
                waiting.extend(self._wire.poll(self._pause(time.monotonic()) if waiting else idle))
                for _ in range(len(self._early)):
                    early = self._early.popleft()
                    self._waiting[early.session] -= 1
                    self._serve(early)
                while waiting and not self._pause(time.monotonic()):
                    self._receive(*waiting.popleft())
                if time.monotonic() >= guard_at:
                    guard_at = time.monotonic() + GUARD_S
                    self._wire.guard(time.monotonic(), self._connections.owners.get)
        finally:
            self._wire.close()

    def _pause(self, now: float) -> float:
        """Return the seconds until both rate limits allow traffic again."""
        return max(
            0.0, *(bucket.open_at(now) - now for bucket in (self.rate_limits.up, self.rate_limits.down))
        )

    def _count(self, up: int, down: int) -> None:
        self.bytes_up, self.bytes_down, now = self.bytes_up + up, self.bytes_down + down, time.monotonic()
        self.rate_limits.up.take(up, now)
        self.rate_limits.down.take(down, now)

    def _receive(self, conn: bytes, frames: Frames) -> None:
        self._count(0, wire_size(frames))
        try:
            if not 1 <= len(frames) <= 2 or len(frames[0]) > messages.MAX_CONTROL:
                raise ProtocolError(f"{len(frames)} frames")
            self._handle(conn, decode_to_hub(frames[0]), frames[1] if len(frames) > 1 else b"")
        except ProtocolError as error:
            log.debug("at the shard server", exc_info=error)

    def _handle(self, conn: bytes, message: messages.ToHub, payload: bytes | memoryview) -> None:
        session = self._connections.owners.get(conn)
        if isinstance(message, messages.Hello):
            self._welcome_member(conn, message)
        elif isinstance(message, messages.Resume | messages.Attach):
            name, key = self._sessions.get(message.session, ("", ""))
            if key != key_of(conn):
                self._send(conn, messages.Refused("session", "no such visitor"))
                return
            self._connections.own(conn, message.session, None)
            again = self._welcome(name, message.session, resumed=True)
            self._send(conn, messages.Attached(CREDIT) if isinstance(message, messages.Attach) else again)
        elif isinstance(message, messages.Leave):
            self._send(conn, messages.Over("left", False))
        elif session is not None and isinstance(message, messages.Put | messages.Chunk):
            for answer in self._inbox.receive(session, message, payload):
                if isinstance(answer, CompletedUpload):
                    round = round_of(PART, answer.name)
                    assert round is not None, "`refuses` let no other in"
                    self.on_part(round, self._sessions[session][0], answer.parts.data())
                else:
                    self._send(conn, answer)
        elif session is not None and isinstance(message, messages.Get):
            self._serve(EarlyRequest(conn, session, message, time.monotonic() + EARLY_S))

    def _welcome_member(self, conn: bytes, m: messages.Hello) -> None:
        key = key_of(conn)
        if m.run != self.run or key not in (self._members.get(m.name), self._newcomers.get(m.name)):
            self._send(conn, messages.Refused("kicked", f"{m.name!r} with this key is not in the round"))
            return
        session = secrets.token_urlsafe(16)
        for old in [s for s, who in self._sessions.items() if who == (m.name, key)]:
            del self._sessions[old]
            self._connections.forget(old)
            self._inbox.drop(old)
        self._sessions[session] = m.name, key
        self._connections.own(conn, session, None)
        self._send(conn, self._welcome(m.name, session, resumed=False))

    def _welcome(self, name: str, session: str, *, resumed: bool) -> messages.Welcome:
        return messages.Welcome(messages.PROTOCOL, self.run, name, session, "", "", [], 0, QUIET_S, resumed)

    def _refuses(self, session: str, name: str, size: int) -> str | None:
        round, who = round_of(PART, name), self._sessions[session]
        # the aggregator may learn of a round late
        if round is None or not self._round <= round <= self._round + 1:
            return f"{name!r} is not wanted here, or not any more"
        if self._members.get(who[0]) != who[1]:
            return f"{who[0]} is not in the round"
        return f"a part of {size} bytes, the longest has {self.limit}" if size > self.limit else None

    def _serve(self, asked: EarlyRequest) -> None:
        """Serve a fragment, or let the request wait. PROTOCOL.md has these objects and who may fetch each."""
        name, key = self._sessions.get(asked.session, ("", ""))
        if asked.message.name in self.files and self.knows(key):
            self._serve_file(asked)
        elif not key or self._members.get(name) != key:
            self._refuse(asked, f"{name} is not in the round")
        elif round_of(PACKET, asked.message.name) is not None:
            self._serve_passed(asked, name)
        else:
            self._serve_chunk(asked)

    def _refuse(self, asked: EarlyRequest, why: str) -> None:
        self._send(asked.conn, messages.NoObject(asked.message.name, why))

    def _wait(self, asked: EarlyRequest, why: str) -> None:
        """Let a request wait, or refuse it: it has waited long, or too many wait."""
        mine = self._waiting[asked.session]
        if time.monotonic() < asked.until and len(self._early) < EARLY and mine < EARLY_OF_ONE:
            self._early.append(asked)
            self._waiting[asked.session] = mine + 1
        else:
            self._refuse(asked, why)

    def _serve_file(self, asked: EarlyRequest) -> None:
        """Serve a fragment of a file while this peer's line has nothing else to send."""
        m = asked.message
        if self.busy():
            self._wait(asked, "this peer has no time for it")
            return
        try:
            with open(self.files[m.name], "rb") as file:
                source = ObjectSource(file, 0, os.fstat(file.fileno()).st_size, b"")
                payload = source.read(m.index, m.chunk)
        except (KeyError, OSError) as error:  # whose text may name folders of this machine
            self._refuse(asked, f"it is not here: {type(error).__name__}")
            return
        self._send(asked.conn, messages.Data(m.name, m.index, source.size), payload)

    def _serve_passed(self, asked: EarlyRequest, name: str) -> None:
        """Serve a fragment that this peer passes on, or let the request wait for it."""
        m, round = asked.message, round_of(PACKET, asked.message.name)
        assert round is not None
        passed = self._passed.get(round)
        try:
            fragment = None if passed is None else passed.read(m)
        except KeyError as error:
            self._refuse(asked, str(error.args[0]))
            return
        if passed is not None and fragment is not None:
            said = messages.Data(m.name, m.index, passed.packet.map.size, passed.packet.sha256)
            self._send(asked.conn, said, fragment)
            if round == self._round and passed.is_last(m):
                self._lacking.discard(name)
        elif round >= self._round:
            self._wait(asked, GONE)
        else:
            self._refuse(asked, GONE)

    def _serve_chunk(self, asked: EarlyRequest) -> None:
        m = asked.message
        try:
            source = self._served[round_of(SHARD, m.name)]  # type: ignore[index]
            payload = source.read(m.index, m.chunk)
        except KeyError:
            self._refuse(asked, GONE)
            return
        self._send(asked.conn, messages.Data(m.name, m.index, source.size, source.sha256), payload)

    def _send(
        self, conn: bytes, message: messages.Message, payload: bytes | memoryview | None = None
    ) -> None:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        self._count(wire_size(frames), 0)
        if not self._wire.send(conn, frames):
            self._connections.drop(conn)
