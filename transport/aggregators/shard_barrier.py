"""Where the commit thread waits for the owners that are peers, and the I/O thread says what came of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from transport.protocol import UpdateRejected
from transport.transfer import ChunkBuffer


class Ended(Exception):
    """The run is over before all owners have answered: the round is not committed."""


class Unmoved(Exception):
    """All owners are lost, and the hub owns nothing: no shard would move. The round is not committed."""


class Gather:
    """One round's packets of shards. An attempt ends when every owner has answered, or is lost."""

    def __init__(self, patience: float) -> None:
        self.patience = patience  # seconds; who has said nothing by then is lost
        self.attempt = 0  # counts over all rounds
        self.lost: dict[str, str] = {}  # owner -> why, since `begin`
        self._waited: set[str] = set()
        self._came: dict[str, bytes] = {}
        self._refused: UpdateRejected | None = None
        self._ended = False
        self._changed = threading.Condition()

    # ---- the commit thread ---------------------------------------------------------------------------------

    def ask(self, owners: Iterable[str]) -> int:
        """An attempt begins; its number, to be told to these owners. What others sent before is void."""
        with self._changed:
            self.attempt += 1
            self._waited, self._came, self._refused = set(owners) - self.lost.keys(), {}, None
            return self.attempt

    def wait(self) -> dict[str, bytes]:
        """Owner -> the packet of its shards. Raises UpdateRejected where one cannot use a peer's part,
        Ended."""
        until = time.monotonic() + self.patience
        with self._changed:
            while self._waited and self._refused is None and not self._ended:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    for owner in self._waited:
                        self.lost[owner] = f"nothing came of it for {self.patience:.0f} s"
                    self._waited = set()
            if self._refused is not None:
                raise self._refused
            if self._waited:
                raise Ended
            return dict(self._came)

    def lose(self, owner: str, why: str) -> None:
        """From either thread."""
        with self._changed:
            self.lost.setdefault(owner, why)
            self._waited.discard(owner)
            self._came.pop(owner, None)
            self._changed.notify_all()

    # ---- the I/O thread ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A round is closed: nobody is lost yet. Here, since who gets lost from now on is told by this
        thread, and the other may still be busy."""
        with self._changed:
            self.lost = {}

    def came(self, owner: str, attempt: int, packet: ChunkBuffer) -> None:
        with self._changed:
            if attempt == self.attempt and owner in self._waited:
                self._came[owner] = packet.data()
                self._waited.discard(owner)
                self._changed.notify_all()

    def refuse(self, owner: str, attempt: int, peer: str, why: str) -> None:
        with self._changed:
            if attempt == self.attempt and self._refused is None:
                self._refused = UpdateRejected(peer, why, owner)
                self._changed.notify_all()

    def end(self) -> None:
        """The run is over: nobody waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
