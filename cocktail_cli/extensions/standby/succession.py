"""A standby's side towards the peers: it answers those that have lost the hub, and counts them. `Succession`
decides, without I/O; `Lookout` is the port, with a thread that carries frames.

Peers that have lost the hub wait here until the standby hears it after they came, and are sent back there
then. Each is pinged, and counts as long as it answers, and the hub is silent. A majority of the voters elects
the standby: of the members of the newest round, by key, those whose samples one of the last eight counted. So
does its host, at any time.
"""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from transport.protocol import CurveKeys, ProtocolError, decode_to_hub, encode, messages
from transport.wire import GUARD_S, RouterWire, key_of

HUB_IS_THERE = "the standby hears the run's hub: dial that one"
HEARD_S = 3.0  # seconds of silence after which the hub counts as lost
PING_S = 1.0
VOTES_S = 3.0  # seconds for which the answer to a ping counts
PATIENCE_S = 2.0  # seconds without the hub before a vote counts: it may be started again
MOST = 4096  # peers that wait at once
POLL_S = 0.1

Answer = tuple[bytes, messages.Message]


@dataclass
class Waiting:
    """A peer that has lost the hub."""

    key: str
    came: float
    seen: float
    pinged: float


class Succession:
    """One standby's peers. `voters`, `synced` and the hub's liveness are told by the follower."""

    def __init__(self, run: str, token: str) -> None:
        self.run, self.token = run, token
        self.voters: frozenset[str] = frozenset()
        self.term = 0
        self.synced = False  # the copy has been whole, and has lost nothing since but what came with the loss
        self.waiting: dict[bytes, Waiting] = {}
        self._lost_at: float | None = None  # when the hub's silence was noticed; None: it is heard

    def hub(self, silence: float, now: float) -> list[Answer]:
        """Note for how many seconds the hub has not been heard; send back who came before it was heard."""
        if silence >= HEARD_S:
            self._lost_at = now if self._lost_at is None else self._lost_at
            return []
        self._lost_at = None
        away = [conn for conn, one in self.waiting.items() if one.came < now - silence]
        for conn in away:
            del self.waiting[conn]
        return [(conn, messages.Refused("term", HUB_IS_THERE)) for conn in away]

    def receive(self, conn: bytes, message: messages.Message, now: float) -> list[Answer]:
        """Answer a message of anybody who dials the standby."""
        if isinstance(message, messages.Pong):
            if (one := self.waiting.get(conn)) is not None:
                one.seen = now
        elif isinstance(message, messages.Leave):
            self.waiting.pop(conn, None)
            return [(conn, messages.Over("left", False))]
        elif isinstance(message, messages.AskStatus):
            known = message.run == self.run and hmac.compare_digest(message.token, self.token)
            status = messages.Status(json.dumps({"run": self.run, "term": self.term, "state": "standby"}))
            return [
                (conn, status if known else messages.Refused("token", "this is the standby of another run"))
            ]
        elif isinstance(message, messages.Hello | messages.Resume):
            return [(conn, self._take(conn, message, now))]
        return []

    def _take(
        self, conn: bytes, message: messages.Hello | messages.Resume, now: float
    ) -> messages.Refused | messages.Wait:
        if message.run != self.run:
            return messages.Refused("run", f"this is the standby of the run {self.run}, not of {message.run}")
        if len(self.waiting) < MOST:
            self.waiting[conn] = Waiting(key_of(conn), now, now, now)
        return messages.Wait(
            "the standby waits until a majority of the peers has lost the hub, or for its host"
        )

    def tick(self, now: float) -> list[Answer]:
        """Ping those that wait, and forget the silent."""
        self.waiting = {c: one for c, one in self.waiting.items() if now < one.seen + VOTES_S}
        due = [(conn, one) for conn, one in self.waiting.items() if now >= one.pinged + PING_S]
        for _, one in due:
            one.pinged = now
        return [(conn, messages.Ping(now)) for conn, _ in due]

    def elected(self, now: float) -> bool:
        """Tell whether a majority of the voters waits here, and the hub has been gone for a moment."""
        keys = {one.key for one in self.waiting.values() if now < one.seen + VOTES_S}
        gone = self._lost_at is not None and now >= self._lost_at + PATIENCE_S
        return self.synced and gone and 2 * len(self.voters & keys) > len(self.voters)


class Lookout:
    """Serves `state` at this address until `close`. Raises AddressInUse.

    Args:
        silence: returns for how many seconds the hub has not been heard; called in this thread.
    """

    def __init__(
        self, address: tuple[str, int], keys: CurveKeys, state: Succession, silence: Callable[[], float]
    ) -> None:
        self._wire, self._state, self._silence = RouterWire(*address, keys), state, silence
        self.port = self._wire.port
        self.elected = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="cocktail-lookout", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        guard_at = 0.0
        while not self._over.is_set():
            came = self._wire.poll(POLL_S)
            now = time.monotonic()
            said = self._state.hub(self._silence(), now)
            for conn, frames in came:
                try:
                    said += self._state.receive(conn, decode_to_hub(frames[0]), now)
                except ProtocolError:
                    continue
            said += self._state.tick(now)
            if self._state.elected(now):
                self.elected.set()
            for conn, message in said:
                self._wire.send(conn, [encode(message)])
            if now >= guard_at:
                guard_at = now + GUARD_S
                self._wire.guard(now, self._owner)
        self._wire.close()

    def _owner(self, conn: bytes) -> str | None:
        return conn.hex() if conn in self._state.waiting else None

    def close(self) -> None:
        self._over.set()
        self._wire.wake()
        self._thread.join(5.0)
