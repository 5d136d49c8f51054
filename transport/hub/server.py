"""The hub's shell: one thread that carries frames between wire and state machine, and others for slow work.

I/O thread      polls the wire, runs HubState and the upload inbox; nothing in it waits for disk or torch
openers         as many as there are cores: HubDelegate.arrived for each update, as it comes
commit thread   HubDelegate.aggregate, ledger, HubDelegate.committed, in this order, one round at a time
reader thread   HubDelegate.samples, HubDelegate.object, reading chunks of files: what a round waits for first
replay thread   HubDelegate.fingerprint, where members disagree about x'
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
from math import inf
from typing import Any

from transport import actions as do
from transport.ledger import Ledger
from transport.membership import AWAKE_S, Session, wrong_version
from transport.protocol import (
    TRIAL,
    UPDATE,
    Cost,
    Event,
    HubDelegate,
    OtherVersion,
    ProtocolError,
    RunKeys,
    RunSettings,
    decode_to_hub,
    encode,
    messages,
    round_of,
    sample_ids,
)
from transport.scheduling import HubExtension, UnderWay
from transport.transfer import (
    MAX_UPLOADS,
    NO_ROW,
    POOL,
    UNWANTED_BYTES,
    VIOLATION,
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
    Crossed,
    Frames,
    HubWire,
    RouterWire,
    key_of,
    origin_of,
    wire_size,
)

from .hub_state import Extend, HubState
from .hub_threads import CommitThread, ReaderThread, Reading
from .newcomer_queue import NewcomerQueue, Waiting

LONGEST_LINGER_S = 120.0  # for peers that fetch slowly after the end
MEASURED, MEASURED_S = 16 * 1024, 0.1  # bytes, s; a shorter upload tells nothing of its line
NEWCOMERS_UPLOADS = 4  # of the longest updates: what newcomers may have here, all together
TICK_S = 0.02  # while things come in, time passes in steps of this: a tick looks at every peer

log = logging.getLogger(__name__)


class Hub:
    """One run's hub. `start`, iterate `events` until it ends, `stop` from any thread.

    Listens at (host, port), or on a wire of the caller's; port 0 takes a free one, and `port` says which.
    Raises AddressInUse.
    """

    def __init__(
        self,
        at: tuple[str, int] | HubWire,
        keys: RunKeys,
        ledger: Ledger,
        settings: RunSettings,
        delegate: HubDelegate,
        extensions: Sequence[Extend] = (),
    ) -> None:
        self.settings, self.ledger, self._delegate = settings, ledger, delegate
        self._wire = RouterWire(*at, keys.pair) if isinstance(at, tuple) else at
        self.port = self._wire.port
        now, recovered = time.monotonic(), ledger.recover()
        self._state = HubState(settings, keys.token, keys.stop, now, recovered, extensions)
        self._members, self._rounds = self._state.members, self._state.rounds
        pool = max(POOL, NEWCOMERS_UPLOADS * settings.update_limit)
        self._inbox = Inbox(self._state.uploads.refusal, self._members.newcomer_from, pool)
        self._newcomers = NewcomerQueue()  # what they say beside the rounds
        self._objects = ObjectStore(ledger, delegate, self._leased)
        self._state.began = self._watched
        for one in self._rounds.extensions:
            self._watched(one)
        self._connections = ConnectionRegistry()
        self._guard_at = 0.0
        self._packets: dict[tuple[str, int], Future[bytes]] = {}  # (session, round) -> its update, opened
        self._put_at: dict[tuple[str, str], float] = {}  # (session, upload) -> when it began to come
        self._handoffs: dict[str, ChunkBuffer] = {}  # session -> its residual, until it is merged
        self._hello_size = 0  # bytes of the message of a stranger that is being read
        # Jobs from other threads for the I/O thread.
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False  # the I/O thread will look at them
        self._tick_at = 0.0
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._openers = ThreadPoolExecutor(os.cpu_count() or 1, "cocktail-opener")
        self._commits = CommitThread(ledger, delegate, self._objects, self._rounds, self)
        self.later = self._commits.later  # of a Shell
        self._reader = ReaderThread(lambda: self._rounds.busy)
        self._thread = threading.Thread(target=self._run, name="cocktail-hub", daemon=True)
        self._end_at: float | None = None  # when to stop serving, once the run is over
        self._end_by = 0.0
        self.error: Exception | None = None  # what ended the run, if it was an error in this process
        self._handlers: dict[type[do.Action], Callable[[Any], None]] = {
            do.Send: lambda a: self._send(a.conn, a.message),
            do.Tell: lambda a: self._events.put(replace(a.event, at=time.time())),
            do.Lease: self._begin_round,
            do.Commit: self._commit,
            do.FindFingerprint: self._replay,
            do.RecordFingerprint: lambda a: self.later(lambda: ledger.proven(a.round, a.fingerprint)),
            do.Inherit: self._inherit,
            do.RecordStanding: lambda a: self._commits.beside(lambda: ledger.stand(a.known)),
            do.RecordEvaluation: lambda a: self.later(lambda: ledger.evaluated(a.row)),
            do.GiveBack: lambda a: self.later(lambda: ledger.given_back(a.session, a.round)),
            do.SendDurably: lambda a: self._commits.beside(
                lambda: self._call(lambda: self._send(a.conn, a.message))
            ),
            do.Reach: self._reach,
            do.Forget: self._forget,
            do.End: self._end,
        }

    def _watched(self, one: HubExtension) -> None:
        one.serve(self._objects)
        one.watch(self)

    # ---- for the caller ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def events(self, tick: float | None = None) -> Iterator[Event | None]:
        """Yield events until the hub has shut down; the last one is RunEnded. None: no event for `tick` s."""
        while True:
            try:
                event = self._events.get(timeout=tick)
            except queue.Empty:
                yield None
                continue
            if event is None:
                return
            yield event

    def stop(self, now: bool = False, reason: str = "stopped by its host", *, pause: bool = False) -> None:
        """End or pause the run, after the exchange in flight, or `now`. Returns at once; `events` ends with
        it."""
        self.apply(lambda t: self._rounds.stop(reason, t, at_once=now, pause=pause))

    def offer(self, offers: Sequence[messages.SnapshotOffer]) -> None:
        """Announce the newest two of these snapshots to peers that join from now on; from any thread.

        Other snapshots may be deleted then: a peer that is fetching one is told so and plans anew.
        """
        self._call(lambda: self._offer(list(offers)))

    def _offer(self, offers: list[messages.SnapshotOffer]) -> None:
        history = self._rounds.history
        history.offer(offers)
        kept = {f"snapshot/{offer.round}/" for offer in history.snapshots}
        self._reader.submit(lambda: self._objects.keep_snapshots(kept))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the hub has shut down; False where `timeout` seconds were not enough."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._end_at is None or (time.monotonic() < self._end_at and self._members.sessions):
                self._turn()
        except Exception as error:  # our bug: the run ends and says so, rather than hanging
            log.debug("the hub's thread failed", exc_info=True)
            self.error = error
            reason = f"{type(error).__name__} in the hub: {error}"
            self._change(lambda _: self._rounds.end(reason, 1))
        finally:
            for one in self._rounds.extensions:
                one.stops()
            self._commits.shutdown()
            self._openers.shutdown(cancel_futures=True)
            self._reader.shutdown()
            self._objects.close()
            self._wire.close()
            self._events.put(None)

    def _turn(self) -> None:
        now, until = time.monotonic(), self._tick_at
        if self._newcomers.waiting_bytes:
            until = min(until, self._newcomers.open_at(now))
        for conn, frames in self._wire.poll(min(GUARD_S, max(0.0, until - now))):
            self._receive(conn, frames)
        self._hear_newcomers()
        self._run_calls()
        now = time.monotonic()
        if now >= self._tick_at:
            self._act(self._state.tick(now))
            self._tick_at = min(now + 1.0, self._state.deadline(), self._end_at or float("inf"))
        else:  # what came may have brought the deadline nearer
            self._tick_at = min(self._tick_at, now + TICK_S)
        if now >= self._guard_at:  # limit the memory of each connection
            # what arrived while this process slept is read first
            if now < self._guard_at + AWAKE_S:
                found = self._wire.guard(
                    now, self._owner, lambda session: self._members.newcomer_from(session) is not None
                )
                self._members.refused += found.closed
                self._reader.replenish(found.held)
            took = time.monotonic() - now  # of thousands of connections: at most a twentieth of this thread
            self._guard_at = now + max(GUARD_S, 20 * took)

    def _owner(self, conn: bytes) -> str | None:
        """Name who pays for a connection: its session; one that waits or decides pays for itself."""
        alone = self._state.admission.pays_for_itself(conn)
        return conn.hex() if alone else self._connections.sessions.get(conn)

    # ---- any thread (actions.Shell) ------------------------------------------------------------------------

    def _call(self, job: Callable[[], None]) -> None:
        """Run a job in the I/O thread."""
        self._calls.append(job)
        if not self._woken:
            self._woken = True
            self._wire.wake()

    def apply(self, change: Callable[[float], object]) -> None:
        self._call(lambda: self._change(change))

    def warn(self, peer: str, message: str) -> None:
        self.apply(lambda _: self._state.out.warn(message, peer))

    def fail(self, error: Exception, reason: str, exit_code: int) -> None:
        self.error = self.error or error  # the first: the others may follow from it
        self.apply(lambda _: self._rounds.end(reason, exit_code))

    # ---- the I/O thread: from the wire ---------------------------------------------------------------------

    def _receive(self, conn: bytes, frames: Frames) -> None:
        now, size = time.monotonic(), wire_size(frames)
        owner = self._connections.sessions.get(conn)
        session = self._members.get(owner) if owner is not None else None
        if owner is not None:
            self._members.traffic[owner].up += size
        if not self._connections.may_say(conn, sum(map(len, frames[:1])), now):
            self._hang_up(conn)
        elif (message := self._decoded(conn, frames, now)) is None:
            return
        elif (
            self._rounds.busy
            and (session is None or not session.proven)
            and not self._absurd(session, message)
        ):
            if session is not None:
                session.seen = now
            waiting = Waiting(conn, message, frames[1:], size, origin_of(conn), owner or conn.hex())
            if (dropped := self._newcomers.put(waiting, now)) is not None:
                self._hang_up_on(dropped)
        else:
            self._handle(conn, message, frames[1:], size, now)

    def _decoded(self, conn: bytes, frames: Frames, now: float) -> messages.ToHub | None:
        """Decode a message. None: it cannot be; a few such ones end a session."""
        try:
            if not 1 <= len(frames) <= 2 or len(frames[0]) > messages.MAX_CONTROL:
                raise ProtocolError(f"{len(frames)} frames")
            return decode_to_hub(frames[0])
        except OtherVersion as error:
            self._send(conn, wrong_version(error.protocol))
        except ProtocolError:
            self._members.refused += 1
            self._unwanted(conn, VIOLATION, now)
        return None

    def _absurd(self, session: Session | None, message: messages.Message) -> bool:
        """Tell whether a message asks for, or brings, what its session may never have or bring: to refuse it
        costs less than to let it wait."""
        if isinstance(message, messages.Get):
            return session is None or self._objects.kind_of(message.name, session.role) is None
        return isinstance(message, messages.Put | messages.Chunk) and (
            session is None or not self._state.uploads.known(message.name)
        )

    def _hear_newcomers(self) -> None:
        """Handle what newcomers have said, within their share of this thread while rounds go on."""
        while self._newcomers.waiting_bytes:
            now = time.monotonic()
            if self._rounds.busy and self._newcomers.open_at(now) > now:
                return
            message = self._newcomers.take()
            self._handle(message.conn, message.message, message.payload, message.size, now)
            self._newcomers.took(time.monotonic() - now, now)

    def _hang_up(self, conn: bytes) -> None:
        self._members.refused += 1
        self._wire.hang_up(conn)

    def _hang_up_on(self, payer: str) -> None:
        """Close all connections of a session, or a connection that has none, by its name in hex."""
        for conn in [*self._connections.of(payer)] or [bytes.fromhex(payer)]:
            self._newcomers.drop(origin_of(conn), payer)
            self._hang_up(conn)

    def _handle(self, conn: bytes, message: messages.ToHub, payload: Frames, size: int, now: float) -> None:
        if conn not in self._connections.sessions:
            self._hello_size = size
        self._connections.costs(conn, message, now)
        if isinstance(message, messages.Attach):
            self._attach(conn, message)
        elif isinstance(message, messages.Put | messages.Chunk):
            self._put(conn, message, payload[0] if payload else b"", now)
        elif isinstance(message, messages.Get):
            self._get(conn, message, now)
        else:
            if isinstance(message, messages.Hello):
                # This peer may be back before the loss of a connection was noticed: sending to that tells.
                for earlier in self._members.conns_of(message.name, key_of(conn)):
                    self._send(earlier, messages.Ping(now))
                self._run_calls()
            ignored = self._members.ignored
            self._act(self._state.receive(conn, message, now))
            if self._members.ignored > ignored:
                self._unwanted(conn, 1.0, now)

    def _unwanted(self, conn: bytes, cost: float, now: float) -> None:
        """Charge a connection for what nobody wants: it asks for what is not there, or sends it."""
        if not self._connections.tolerates(conn, cost, now):
            self._hang_up_on(self._connections.sessions.get(conn, conn.hex()))

    def _run_calls(self) -> None:
        self._woken = False  # first: a call that is added from here on wakes this thread again
        while self._calls:
            self._calls.popleft()()

    def _own(self, conn: bytes, session: str) -> None:
        """Count this connection, its handshake and Hello included, as the session's from now on."""
        if self._connections.sessions.get(conn) != session:
            whose = self._members.get(session)
            self._connections.own(conn, session, whose.conn if whose else None)
            self._members.traffic[session].up += HANDSHAKE_UP + self._hello_size
            self._members.traffic[session].down += HANDSHAKE_DOWN

    def _attach(self, conn: bytes, message: messages.Attach) -> None:
        session = self._members.get(message.session)
        if session is None or session.key != key_of(conn):
            self._send(conn, messages.Refused("session", "the hub does not know this session"))
            return
        self._own(conn, message.session)
        self._send(conn, messages.Attached(self.settings.credit))

    def _put(
        self, conn: bytes, message: messages.Put | messages.Chunk, payload: bytes | memoryview, now: float
    ) -> None:
        session = self._connections.sessions.get(conn)
        if session is None:
            self._of_no_session(conn, now)
            return
        if not self._state.uploads.known(message.name):
            self._send(conn, messages.PutDone(message.name, False, "no upload has such a name"))
            self._unwanted(conn, VIOLATION, now)
            return
        if isinstance(message, messages.Chunk):
            self._rounds.moves(session)
        for answer in self._inbox.receive(session, message, payload):
            if isinstance(answer, CompletedUpload):
                self._arrived(answer)
                continue
            if isinstance(answer, messages.Have):
                self._put_at[session, message.name] = now
            elif isinstance(answer, messages.PutDone) and not answer.ok:
                self._put_at.pop((session, message.name), None)
                self._unwanted(conn, 1 + len(payload) / UNWANTED_BYTES, now)
            self._send(conn, answer)

    def _of_no_session(self, conn: bytes, now: float) -> None:
        """Tell a connection that it belongs to no session; one that goes on nevertheless is hung up on."""
        self._send(conn, messages.Refused("session", "this connection belongs to no session"))
        self._unwanted(conn, VIOLATION / 4, now)  # of an honest peer some are under way

    def _arrived(self, upload: CompletedUpload) -> None:
        session, round = upload.session, round_of(UPDATE, upload.name)
        sender = self._members.get(session)
        took = time.monotonic() - self._put_at.pop((session, upload.name), inf)
        size = upload.parts.map.size
        if sender is not None and took >= MEASURED_S and size >= MEASURED:
            sender.uplink = size / took
        if sender is None or round_of(TRIAL, upload.name) is not None:
            return  # it was kicked a moment ago; a trial has served its purpose by arriving
        if round is not None:
            self._packets[session, round] = self._openers.submit(self._open, round, sender.name, upload.parts)
            self._change(lambda now: self._rounds.uploaded(session, round, now))
        elif (kind := self._state.uploads.kind_of(upload.name)) is not None:
            places = kind.places(upload.name) or ()
            self._change(lambda now: kind.took(sender, places, upload.parts, now))
        else:
            self._handoffs[session] = upload.parts
            self._change(lambda _: self._state.uploads.handed_over(session, upload.parts.map.size))

    def _get(self, conn: bytes, message: messages.Get, now: float) -> None:
        session = self._connections.sessions.get(conn)
        sender = self._members.get(session) if session is not None else None
        if session is None or sender is None:
            self._of_no_session(conn, now)
            return
        kind = self._objects.kind_of(message.name, sender.role)
        if kind is None:
            self._send(conn, messages.NoObject(message.name, NO_ROW))
            self._unwanted(conn, VIOLATION, now)
            return
        self._rounds.moves(session)
        if self._end_at is not None:  # a peer still fetches: the end waits for it
            self._end_at = min(self._end_by, now + self.settings.linger_s)
        held = sum(map(self._wire.held, self._connections.of(session)))
        size = self._connections.begin_read(session, message.chunk, held)
        if not size:
            self._members.refused += 1
        elif (answer := self._objects.at_hand(message)) is not None:
            self._connections.end_read(session, size)
            self._send(conn, *answer)
        else:
            urgent = kind.cost is Cost.ROUND or sender.key == self.settings.own_key
            self._reader.read(
                Reading(
                    lambda: self._read(conn, session, message, size), size, urgent, sender.origin, session
                )
            )

    def _send(self, conn: bytes, message: messages.Message, payload: bytes | None = None) -> None:
        frames = [encode(message)] if payload is None else [encode(message), payload]
        if isinstance(message, messages.Welcome):
            self._own(conn, message.session)
        self._members.refused += isinstance(message, messages.Refused)
        self._connections.costs(conn, message, time.monotonic())
        owner = self._connections.sessions.get(conn)
        if owner is not None:
            self._members.traffic[owner].down += wire_size(frames)
        if not self._wire.send(conn, frames):
            self._connections.drop(conn)
            # Later: first the messages to the other peers, in their order.
            self._calls.append(lambda: self._act(self._state.lost(conn, time.monotonic())))

    def _leased(self, session: str, round: int) -> list[int] | None:
        """Return the sample ids of a session's lease; called by the reader thread."""
        ids = self._rounds.leases.ids(session, round)
        return None if ids is None else sample_ids(ids)

    def crossed(self, session: str) -> list[Crossed]:
        """Return what has crossed each connection of a session, as far as the system tells."""
        found = (self._wire.crossed(conn) for conn in self._connections.of(session))
        return [line for line in found if line is not None]

    def under_way(self, session: str, round: int, now: float) -> UnderWay | None:
        """Return what is here of a session's update for a round; None: none of it, or all."""
        name = f"{UPDATE}{round}"
        there = self._inbox.under_way(session, name)
        return there and UnderWay(now - self._put_at.get((session, name), now), *there)

    # ---- the I/O thread: actions ---------------------------------------------------------------------------

    def _change(self, change: Callable[[float], object]) -> None:
        self._act(self._state.apply(change, time.monotonic()))

    def _act(self, actions: list[do.Action]) -> None:
        for action in actions:
            self._handlers[type(action)](action)

    def _begin_round(self, action: do.Lease) -> None:
        self._commits.opened[action.round] = time.time()
        kept = None, action.round
        self._inbox.forget(lambda name: round_of(UPDATE, name) not in kept)
        self._packets = {k: v for k, v in self._packets.items() if k[1] >= action.round}
        self._put_at = {key: at for key, at in self._put_at.items() if round_of(UPDATE, key[1]) in kept}
        self._inbox.at_once = MAX_UPLOADS + sum(one.at_once for one in self._rounds.extensions)
        self.later(lambda: self._commits.write_leases(action))

    def _commit(self, action: do.Commit) -> None:
        found = {c.session: self._packets.get((c.session, action.round)) for c in action.claims}
        packets = {session: packet for session, packet in found.items() if packet is not None}
        self.later(lambda: self._commits.commit(action, packets))

    def _inherit(self, action: do.Inherit) -> None:
        handoff = self._handoffs.pop(action.session)
        self.later(lambda: self._commits.inherit(action, handoff))

    def _reach(self, action: do.Reach) -> None:
        """Dial a peer's server, which accepts the hub's key, in a thread: a timeout takes seconds."""

        def dial() -> None:
            ok = self._wire.reaches(action.address, action.key)
            self.apply(lambda _: self._state.reached(action.session, ok))

        threading.Thread(target=dial, name="cocktail-reach", daemon=True).start()

    def _forget(self, action: do.Forget) -> None:
        self._inbox.drop(action.session)
        self._newcomers.drop(action.origin, action.session)
        self._reader.forget(action.origin, action.session)
        self._put_at = {key: at for key, at in self._put_at.items() if key[0] != action.session}
        self._members.traffic.pop(action.session, None)
        self._handoffs.pop(action.session, None)
        self._connections.forget(action.session)
        if action.recorded:
            self.later(lambda: self.ledger.gone(action.session))

    def _end(self, action: do.End) -> None:
        self._end_at = time.monotonic() + self.settings.linger_s
        self._end_by = self._end_at + LONGEST_LINGER_S

    def _replay(self, action: do.FindFingerprint) -> None:
        """Fold the ledger to x' of a round, in a thread: it may take minutes, in which rounds go on."""

        def replay() -> None:
            truth, why = None, ""
            try:
                truth = self._delegate.fingerprint(action.round)
            except Exception as error:  # of a disk, say: nobody is dropped for it
                log.debug("the replay of round %d", action.round, exc_info=True)
                why = f"{type(error).__name__}: {error}"
            self.apply(lambda now: self._rounds.fingerprinted(action.round, truth, why, now))

        threading.Thread(target=replay, name="cocktail-replay", daemon=True).start()

    # ---- the openers ---------------------------------------------------------------------------------------

    def _open(self, round: int, peer: str, parts: ChunkBuffer) -> bytes:
        packet = parts.data()
        self._delegate.arrived(round, peer, packet)
        return packet

    # ---- the reader thread ---------------------------------------------------------------------------------

    def _read(self, conn: bytes, session: str, message: messages.Get, size: int) -> None:
        answer, payload = self._objects.answer(session, message)

        def send() -> None:
            self._connections.end_read(session, size)
            self._send(conn, answer, payload)

        self._call(send)
