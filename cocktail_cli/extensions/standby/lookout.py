"""The port of a standby while it waits: a thread that carries frames between the wire and `Succession`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from transport.protocol import CurveKeys, ProtocolError, decode_to_hub, encode
from transport.wire import GUARD_S, RouterWire

from .succession import Succession

POLL_S = 0.1


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
