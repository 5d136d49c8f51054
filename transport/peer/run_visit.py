"""A look at a run before joining it, on a connection without a session.

The hub tells what a joiner wants to know, and shows its host that somebody is deciding, where somebody is.
Nothing is fetched, and the run waits for nobody, until the user has agreed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from transport.protocol import LinkLost, ProtocolError, RunURL, Unreachable, decode_to_peer, encode, messages
from transport.wire import DealerWire, Disconnected, Received, routes_to

from .admin_client import answer_on
from .hub_status import status_of
from .peer_link import PeerIdentity

ANSWER_S = 20.0  # a hub that takes connections may take this long to answer
REDIAL_S = 1.0
GOODBYE_S = 1.0


@dataclass(frozen=True)
class RunPreview:
    """The hub's answer to a visitor."""

    status: dict[str, Any]  # the object of `cocktail status --json`
    welcome: messages.Welcome  # as Hello would be answered now, but for name and session


class RunVisit:
    """A visit of one user. `look`, `decide` while the user does, `end`."""

    def __init__(self, url: RunURL, identity: PeerIdentity) -> None:
        self.url, self.identity = url, identity
        self._wire = DealerWire(routes_to(url), url.key, identity.keys)
        self._thread = threading.Thread(target=self._stay, name="visit", daemon=True)
        self._over, self._declined = threading.Event(), False

    def look(self, patience: float, waits: bool = False) -> RunPreview:
        """Ask the hub. While it cannot be reached, dial again for `patience` seconds; where nobody `waits`
        for it to come back, another key than the URL's ends that at once.

        Raises Unreachable, RefusedByHub, LinkLost, ProtocolError.
        """
        until = time.monotonic() + patience
        while True:
            try:
                status = self._ask()
                return RunPreview(status, preview_of(status))
            except (Unreachable, LinkLost) as error:
                away = isinstance(error, Unreachable) and error.layer != "key"
                if time.monotonic() >= until or not (waits or away):
                    raise
                time.sleep(REDIAL_S)

    def decide(self) -> None:
        """Be seen as deciding until the visit ends."""
        deciding = messages.Deciding(
            messages.PROTOCOL, self.url.token, self.url.run, self.identity.name, self.identity.hardware
        )
        self._wire.send(0, [encode(deciding)])
        self._thread.start()

    def end(self, declined: bool) -> None:
        """End the visit; the hub hears of a user who has declined. May be called at any time, and again."""
        if self._over.is_set():
            return
        self._declined = declined
        self._over.set()
        if self._thread.ident is None:
            self._wire.close()
        else:
            self._wire.wake()
            self._thread.join(2 * GOODBYE_S)

    def _ask(self) -> dict[str, Any]:
        question = messages.AskStatus(messages.PROTOCOL, self.url.token, self.url.run, True)
        answer = answer_on(self._wire, question, ANSWER_S)
        if answer is None:
            raise LinkLost(f"waited {ANSWER_S:.0f} s for the hub's answer")
        return status_of(answer)

    def _stay(self) -> None:
        """Answer the hub's pings until the visit ends."""
        connected = True
        while connected and not self._over.is_set():
            connected = self._listen(0.5)
        if connected and self._declined:
            self._wire.send(0, [encode(messages.Leave("declined"))])
            self._listen(GOODBYE_S)
        self._wire.close()

    def _listen(self, timeout: float) -> bool:
        """Handle what comes; False once the connection is gone, or brings what is no message."""
        for event in self._wire.poll(timeout):
            if isinstance(event, Disconnected):
                return False
            if isinstance(event, Received):
                try:
                    message = decode_to_peer(event.frames[0])
                except ProtocolError:
                    return False
                if isinstance(message, messages.Ping):
                    self._wire.send(0, [encode(messages.Pong(message.sent))])
        return True


def preview_of(status: dict[str, Any]) -> messages.Welcome:
    """Build the Welcome that a joiner would get. Raises ProtocolError where the hub's answer lacks a part."""
    known = {key: status.get(key) for key in ("run", "recipe", "recipe_hash", "base", "round")}
    known |= {key: status.get(key) for key in ("log_bytes", "snapshots")}
    rest = {"type": "Welcome", "protocol": messages.PROTOCOL, "name": "", "session": "", "ping_s": 0.0}
    try:
        return msgspec.convert(known | rest, messages.Welcome)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the hub's status is not one for joiners: {error}") from None
