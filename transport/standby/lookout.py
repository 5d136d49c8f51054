"""The port of a standby while it waits: a thread that carries frames between the wire and `Succession`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from transport.protocol import CurveKeys, ProtocolError, decode_to_hub, encode
from transport.wire import GUARD_S, RouterWire

from .succession import Answer, Succession

POLL_S = 0.1


class Lookout:
    """Serves `state` at this address until `close`. Raises AddressInUse."""

    def __init__(self, address: tuple[str, int], keys: CurveKeys, state: Succession) -> None:
        self._wire, self._state = RouterWire(*address, keys), state
        self.port = self._wire.port
        self.elected = threading.Event()
        self._answers: list[Answer] = []  # to what others have told
        self._over, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="cocktail-lookout", daemon=True)
        self._thread.start()

    def tell(self, change: Callable[[Succession, float], Iterable[Answer] | None]) -> None:
        """Change the state, from any thread, and send what that answers."""
        with self._lock:
            self._answers.extend(change(self._state, time.monotonic()) or ())
        self._wire.wake()

    def _serve(self) -> None:
        guard_at = 0.0
        while not self._over.is_set():
            came = self._wire.poll(POLL_S)
            with self._lock:
                now, said = time.monotonic(), self._answers
                self._answers = []
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
