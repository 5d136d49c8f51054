"""The hub's shell: one thread that carries frames between wire and machines, and others that do slow things.

I/O thread      polls the wire, runs HubState and the bulk inbox; nothing in it waits for a disk or for torch
openers         as many as there are cores: Work.arrived for each update, as it comes
commit thread   Work.aggregate, ledger, Work.committed, in this order, one round at a time
reader thread   Work.samples, Work.object, reading chunks of files
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from transport import actions as do
from transport.aggregators import HubShards
from transport.ledger import EvaluationRow, Ledger
from transport.membership import AWAKE_S, wrong_version
from transport.protocol import (
    HANDOFF,
    MAX_CONTROL,
    TRIAL,
    UPDATE,
    Attach,
    Attached,
    Chunk,
    CurveKeys,
    Event,
    Get,
    Hello,
    HubDelegate,
    Message,
    OtherVersion,
    Ping,
    ProtocolError,
    Put,
    Refused,
    RunKeys,
    RunSettings,
    SnapshotOffer,
    Warned,
    Welcome,
    decode_to_hub,
    encode,
    round_of,
    sample_ids,
)
from transport.transfer import (
    MAX_UPLOADS,
    ChunkBuffer,
    CompletedUpload,
    ConnectionRegistry,
    Inbox,
    ObjectStore,
)
from transport.wire import (
    GUARD_S,
    HANDSHAKE_DOWN,
    HANDSHAKE_UP,
    Frames,
    HubWire,
    RouterWire,
    key_of,
    wire_size,
)

from .commit_thread import Commits
from .hub_state import HubState
from .upload_checks import refuses

LONGEST_LINGER_S = 120.0  # for peers that fetch slowly after the end
TICK_S = 0.02  # while things come in, time passes in steps of this: a tick looks at every peer

log = logging.getLogger(__name__)


class Hub:
    """One run's hub. `start`, iterate `events` until it ends, `stop` from any thread.

    Raises AddressInUse at once. Port 0 takes a free one; `port` says which.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: RunKeys,
        ledger: Ledger,
        settings: RunSettings,
        work: HubDelegate,
        *,
        wire: HubWire | None = None,
    ) -> None:
        self.settings, self.ledger, self.work = settings, ledger, work
        self._wire = wire or RouterWire(host, port, CurveKeys(keys.public, keys.secret))
        self.port = self._wire.port
        self._state = HubState(settings, keys.token, keys.stop, time.monotonic(), ledger.recover())
        self._inbox = Inbox(self._refuses)
        own = CurveKeys(keys.public, keys.secret)
        self._shards = HubShards(self._state, ledger, work, self._call, self._later, self.warn, own)
        self._objects = ObjectStore(ledger, work, self._lease, self._shards.find)
        self._flows = ConnectionRegistry()
        self._guard_at = 0.0
        self._packets: dict[tuple[str, int], Future[bytes]] = {}  # (session, round) -> its update, opened
        self._legacies: dict[str, ChunkBuffer] = {}  # session -> what it hands over, until the owner has it
        self._greeting = 0  # bytes of the message of a stranger that is being looked at
        self._calls: deque[Callable[[], list[do.Action]]] = (
            deque()
        )  # from other threads, run by the I/O thread
        self._woken = False  # it will look at them
        self._tick_at = 0.0
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._openers = ThreadPoolExecutor(os.cpu_count() or 1, "cocktail-opener")
        self._commits = Commits(
            ledger, work, self._objects, self._shards, self._state, self._call, self._failed
        )
        self._reader = ThreadPoolExecutor(1, "cocktail-reader")
        self._thread = threading.Thread(target=self._run, name="cocktail-hub", daemon=True)
        self._end_at: float | None = None  # when to stop serving, once the run is over
        self._end_by = 0.0
        self.error: Exception | None = None  # what ended the run, if it was an error in this process

    # ---- for the caller ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def events(self) -> Iterator[Event]:
        """What happens, as it happens; the last one is RunEnded. Yields until the hub has shut down."""
        while (event := self._events.get()) is not None:
            yield event

    def stop(self, now: bool = False, reason: str = "stopped by its owner") -> None:
        """End the run, after the exchange in flight, or `now`. Returns at once; `events` ends with it."""
        self._call(lambda: self._state.stop(reason, time.monotonic(), at_once=now))

    def offer(self, offers: Sequence[SnapshotOffer]) -> None:
        """Announce these snapshots to whoever joins from now on, the newest two of them; from any thread.

        Files of others may be deleted then: peers that are fetching one are told that it is gone, and think
        anew.
        """
        self._call(lambda: self._offer(list(offers)))

    def _offer(self, offers: list[SnapshotOffer]) -> list[do.Action]:
        self._state.history.offer(offers)
        kept = {f"snapshot/{offer.round}/" for offer in self._state.history.snapshots}
        self._reader.submit(self._objects.keep_snapshots, kept)
        return []

    def warn(self, peer: str, message: str) -> None:
        """Tell the events' reader something about a peer, that `Work` found out; from any thread."""
        self._events.put(Warned(time.time(), message, peer))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the hub has shut down; False where `timeout` seconds were not enough."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._end_at is None or (time.monotonic() < self._end_at and self._state.members.sessions):
                self._turn()
        except Exception as error:  # our bug: the run ends and says so, rather than hanging
            log.debug("the hub's thread failed", exc_info=True)
            self.error = error
            self._act(self._state.failed(f"{type(error).__name__} in the hub: {error}", 1, time.monotonic()))
        finally:
            self._shards.gather.end()
            self._commits.shutdown()
            self._openers.shutdown(cancel_futures=True)
            self._reader.shutdown(cancel_futures=True)
            self._objects.close()
            self._wire.close()
            self._events.put(None)

    def _turn(self) -> None:
        for conn, frames in self._wire.poll(min(GUARD_S, max(0.0, self._tick_at - time.monotonic()))):
            self._receive(conn, frames)
        self._run_calls()
        now = time.monotonic()
        if now >= self._tick_at:
            self._act(self._state.tick(now))
            self._tick_at = min(now + 1.0, self._state.deadline(), self._end_at or float("inf"))
        else:  # what came may have brought the deadline nearer
            self._tick_at = min(self._tick_at, now + TICK_S)
        self._guard(now)

    def _guard(self, now: float) -> None:
        """See that no connection holds more than it may. What came while this process slept is read first."""
        if now >= self._guard_at:
            if now < self._guard_at + AWAKE_S:
                self._state.members.refused += self._wire.guard(now, self._owner)
            took = time.monotonic() - now  # of thousands of connections: at most a twentieth of this thread
            self._guard_at = now + max(GUARD_S, 20 * took)

    def _owner(self, conn: bytes) -> str | None:
        """Whose a connection is: a session's; of those who wait for the owner's yes, each is its own."""
        waits = conn in self._state.admission.asking
        return conn.hex() if waits else self._flows.owners.get(conn)

    def _call(self, call: Callable[[], list[do.Action]]) -> None:
        """Have the I/O thread do this; from any thread."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._wire.wake()

    def _receive(self, conn: bytes, frames: Frames) -> None:
        now = time.monotonic()
        owner = self._flows.owners.get(conn)
        if owner is not None:
            self._state.members.traffic[owner].up += wire_size(frames)
        else:
            self._greeting = wire_size(frames)
        if not self._flows.may_say(conn, sum(map(len, frames[:1])), now):
            self._state.members.refused += 1
            self._wire.hang_up(conn)
            return
        try:
            if not 1 <= len(frames) <= 2 or len(frames[0]) > MAX_CONTROL:
                raise ProtocolError(f"{len(frames)} frames")
            message = decode_to_hub(frames[0])
        except OtherVersion as error:
            self._send(conn, wrong_version(error.protocol))
            return
        except ProtocolError:
            self._state.members.refused += 1
            return
        self._flows.costs(conn, message, now)
        payload = frames[1] if len(frames) == 2 else b""
        if isinstance(message, Attach):
            self._attach(conn, message)
        elif isinstance(message, Put | Chunk):
            self._put(conn, message, payload, now)
        elif isinstance(message, Get):
            self._get(conn, message)
        else:
            if isinstance(message, Hello):
                self._look_for(message.name, key_of(conn), now)
            self._act(self._state.receive(conn, message, now))

    def _look_for(self, name: str, key: str, now: float) -> None:
        """Is the peer of this name still there? One that was killed may be back before anybody noticed."""
        for conn in self._state.members.conns_of(name, key):
            self._send(conn, Ping(now))
        self._run_calls()

    def _run_calls(self) -> None:
        self._woken = False  # first: who adds a call from here on wakes this thread again
        while self._calls:
            self._act(self._calls.popleft()())

    def _own(self, conn: bytes, session: str) -> None:
        """This connection is a session's from now on, its handshake and greeting included."""
        if self._flows.owners.get(conn) != session:
            whose = self._state.members.get(session)
            self._flows.own(conn, session, whose.conn if whose else None)
            self._state.members.traffic[session].up += HANDSHAKE_UP + self._greeting
            self._state.members.traffic[session].down += HANDSHAKE_DOWN

    def _attach(self, conn: bytes, message: Attach) -> None:
        session = self._state.members.get(message.session)
        if session is None or session.key != key_of(conn):
            self._send(conn, Refused("session", "the hub does not know this session"))
            return
        self._own(conn, message.session)
        self._send(conn, Attached(self.settings.credit))

    def _put(self, conn: bytes, message: Put | Chunk, payload: bytes | memoryview, now: float) -> None:
        session = self._flows.owners.get(conn)
        if session is None:
            self._send(conn, Refused("session", "this connection belongs to no session"))
            return
        for answer in self._inbox.receive(session, message, payload):
            if isinstance(answer, CompletedUpload):
                self._arrived(answer, now)
            else:
                self._send(conn, answer)

    def _arrived(self, upload: CompletedUpload, now: float) -> None:
        session, round = upload.session, round_of(UPDATE, upload.name)
        sender = self._state.members.get(session)
        if sender is None or round_of(TRIAL, upload.name) is not None:
            return  # it was sent away a moment ago; of a trial all that counts is that it is here
        if round is not None:
            self._packets[session, round] = self._openers.submit(self._open, round, sender.name, upload.parts)
            self._act(self._state.uploaded(session, round, now))
        elif round_of(HANDOFF, upload.name) is None:
            self._act(self._shards.arrived(upload, now))
        else:
            self._legacies[session] = upload.parts
            self._act(self._state.handed_over(session, upload.parts.map.size, now))

    def _refuses(self, session: str, name: str, size: int) -> str | None:
        return refuses(self._state, session, name, size)

    def _get(self, conn: bytes, message: Get) -> None:
        session = self._flows.owners.get(conn)
        if session is None:
            self._send(conn, Refused("session", "this connection belongs to no session"))
            return
        if self._end_at is not None:  # somebody still fetches: the run is over, but not for them
            self._end_at = min(self._end_by, time.monotonic() + self.settings.linger_s)
        held = sum(map(self._wire.held, self._flows.of(session)))
        size = self._flows.begin_read(session, message.chunk, held)
        if not size:
            self._state.members.refused += 1
        elif (answer := self._objects.at_hand(message)) is not None:
            self._flows.end_read(session, size)
            self._send(conn, *answer)
        else:
            self._reader.submit(self._read, conn, session, message, size)

    def _send(self, conn: bytes, message: Message, payload: bytes | None = None) -> None:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        if isinstance(message, Welcome):
            self._own(conn, message.session)
        self._state.members.refused += isinstance(message, Refused)
        self._flows.costs(conn, message, time.monotonic())
        owner = self._flows.owners.get(conn)
        if owner is not None:
            self._state.members.traffic[owner].down += wire_size(frames)
        if not self._wire.send(conn, frames):
            self._flows.drop(conn)
            # not at once: what is being said to the others comes first, in its order
            self._calls.append(lambda: self._state.lost(conn, time.monotonic()))

    def _lease(self, session: str, round: int) -> list[int] | None:
        """Called by the reader thread; reads one dict entry."""
        ids = self._state.leases.ids(session, round)
        return None if ids is None else sample_ids(ids)

    # ---- actions -------------------------------------------------------------------------------------------

    def _act(self, actions: list[do.Action]) -> None:
        for action in actions:
            if isinstance(action, do.Send):
                self._send(action.conn, action.message)
            elif isinstance(action, do.Tell):
                self._events.put(replace(action.event, at=time.time()))
            elif isinstance(action, do.Commit):
                self._shards.gather.begin()
                there = {c.session: self._packets.get((c.session, action.round)) for c in action.claims}
                packets = {session: parts for session, parts in there.items() if parts is not None}
                self._later(lambda a=action, p=packets: self._commits.commit(a, p))  # type: ignore[misc]
            elif isinstance(action, do.Lease):
                self._commits.opened[action.round] = time.time()
                self._inbox.forget(lambda name, now=action.round: round_of(UPDATE, name) not in (None, now))  # type: ignore[misc]
                self._packets = {k: v for k, v in self._packets.items() if k[1] >= action.round}
                self._shards.opened(action.round)
                self._reader.submit(self._objects.opened)
                self._inbox.at_once = MAX_UPLOADS + action.owners
                self._later(lambda a=action: self._commits.write_leases(a))  # type: ignore[misc]
            elif isinstance(action, do.Inherit):
                legacy = self._legacies.pop(action.session)
                if action.to_all:
                    self._later(lambda a=action, p=legacy: self._shards.keep_legacy(a, p))  # type: ignore[misc]
                else:
                    self._later(lambda a=action, p=legacy: self._commits.inherit(a, p))  # type: ignore[misc]
            elif isinstance(action, do.Reach | do.Unusable | do.LoseOwner):
                self._shards.act(action)
            elif isinstance(action, do.FindFingerprint):
                self._later(lambda a=action: self._commits.find_fingerprint(a))  # type: ignore[misc]
            elif isinstance(action, do.Enrol):
                self._later(lambda a=action: self.ledger.session(a.session, a.name, a.hardware, a.key))  # type: ignore[misc]
            elif isinstance(action, do.Stand):
                self._later(lambda a=action: self.ledger.stand(a.known))  # type: ignore[misc]
            elif isinstance(action, do.SayDurably):
                said = do.Send(action.conn, action.message)
                self._later(lambda s=said: self._call(lambda: [s]))  # type: ignore[misc]
            elif isinstance(action, do.Forget):
                self._inbox.drop(action.session)
                self._state.members.traffic.pop(action.session, None)
                self._legacies.pop(action.session, None)
                self._flows.forget(action.session)
                self._later(lambda a=action: self.ledger.gone(a.session))  # type: ignore[misc]
            elif isinstance(action, do.GiveBack):
                self._later(lambda a=action: self.ledger.given_back(a.session, a.round))  # type: ignore[misc]
            elif isinstance(action, do.Note):
                row = EvaluationRow(action.round, action.step, action.loss, action.tokens, action.final)
                self._later(lambda r=row: self.ledger.evaluated(r))  # type: ignore[misc]
            elif isinstance(action, do.End):
                self._shards.gather.end()
                self._end_at = time.monotonic() + self.settings.linger_s
                self._end_by = self._end_at + LONGEST_LINGER_S

    # ---- the openers ---------------------------------------------------------------------------------------

    def _open(self, round: int, peer: str, parts: ChunkBuffer) -> bytes:
        packet = parts.data()
        self.work.arrived(round, peer, packet)
        return packet

    # ---- the commit thread ---------------------------------------------------------------------------------

    def _later(self, job: Callable[[], object]) -> None:
        self._commits.later(job)

    def _failed(self, error: Exception) -> None:
        self.error = self.error or error  # the first: the others may follow from it

    # ---- the reader thread ---------------------------------------------------------------------------------

    def _read(self, conn: bytes, session: str, message: Get, size: int) -> None:
        answer, payload = self._objects.answer(session, message)

        def send() -> list[do.Action]:
            self._flows.end_read(session, size)
            self._send(conn, answer, payload)
            return []

        self._call(send)
