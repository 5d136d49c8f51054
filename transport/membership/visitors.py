"""Visitors: people who look at the run and decide whether to join. They have a connection and no session.

The host sees them as `deciding`, so nobody counts as joined before they have agreed. Visitors are in memory
alone, at most MOST of them; a further one is answered all the same, and is not shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transport.actions import Outbox
from transport.protocol import RunSettings, clean_name, events, messages
from transport.wire import key_of

MOST = 16  # shown at once
STAYS_S = 3600.0  # that one of them is shown


@dataclass
class Visitor:
    """A connection whose user decides."""

    name: str
    hardware: str
    key: str
    since: float
    seen: float
    pinged: float


class Visitors:
    """All visitors of a run, by connection."""

    def __init__(self, settings: RunSettings, out: Outbox) -> None:
        self.settings, self._out = settings, out
        self._here: dict[bytes, Visitor] = {}

    def __iter__(self) -> Iterator[Visitor]:
        return iter(sorted(self._here.values(), key=lambda v: v.name))

    def __contains__(self, conn: object) -> bool:
        return conn in self._here

    def come(self, conn: bytes, m: messages.Deciding, now: float) -> None:
        """Note a visitor, and tell the host."""
        if conn in self._here or len(self._here) >= MOST:
            return
        name = clean_name(m.name)
        self._here[conn] = Visitor(name, m.hardware, key_of(conn), now, now, now)
        self._out.tell(events.PeerDeciding(0.0, name, m.hardware))

    def heard(self, conn: bytes, message: messages.Message, now: float) -> bool:
        """Take a message of a visitor: only Leave means something. False: it is not a visitor's."""
        if conn not in self._here:
            return False
        self._here[conn].seen = now
        if isinstance(message, messages.Leave):
            self._out.send(conn, messages.Over("left", False))
            self.gone(conn)
        return True

    def gone(self, conn: bytes) -> None:
        """Note that a visitor has declined, or hung up."""
        visitor = self._here.pop(conn, None)
        if visitor is not None:
            self._out.tell(events.PeerDeclined(0.0, visitor.name))

    def joined(self, key: str) -> None:
        """Forget the visitors with the key of a peer that begins a session."""
        self._here = {conn: v for conn, v in self._here.items() if v.key != key}

    def tick(self, now: float, asleep: float) -> None:
        """Ping visitors and drop silent ones. The hub was suspended for `asleep` seconds."""
        for conn, visitor in list(self._here.items()):
            visitor.since += asleep
            visitor.seen += asleep
            if now >= self._until(visitor):
                self.gone(conn)
            elif now >= visitor.pinged + self.settings.ping_s:
                visitor.pinged = now
                self._out.send(conn, messages.Ping(now))

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        pings = [min(self._until(v), v.pinged + self.settings.ping_s) for v in self._here.values()]
        return min(pings, default=float("inf"))

    def _until(self, visitor: Visitor) -> float:
        return min(visitor.since + STAYS_S, visitor.seen + self.settings.peer_timeout)
