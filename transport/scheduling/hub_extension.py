"""HubExtension: an optional capability at a hub, which calls its methods and knows no more of it.

Its messages are bodies: bytes that only its two halves read, by its name in `extra` of Round, Report and
Committed. A peer may send any bytes there: a body that cannot be read is the peer's fault and never an error
of the hub.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from transport.ledger import Counted
from transport.membership import Session
from transport.protocol import SampleRanges
from transport.transfer import ObjectStore

from .exchange import Exchange


class HubExtension:
    """An optional capability at a hub. Every method does nothing unless it is overridden.

    All are called in the hub's I/O thread, so none may wait, but for `counted`, which runs in the commit
    thread, and what `serve` adds, which runs in the reader thread.
    """

    name = ""  # of its bodies, and of its figures in the status

    def serve(self, objects: ObjectStore) -> None:
        """Add rows of objects that peers may fetch."""

    def may_lease(self, session: Session, round: int) -> bool:
        """Tell whether a ready peer may have a lease of the round that opens. Without, it is a member only to
        deliver the leases that it has."""
        return True

    def choose(
        self, round: int, ready: Sequence[Session], holding: Collection[str], newcomers: int
    ) -> list[Session] | None:
        """Choose the members of the round that opens, by name; None: the hub does. One extension may.

        Args:
            ready: those that could be members.
            holding: sessions of those with a lease that they have not delivered.
            newcomers: at most so many members without an update in the run.
        """
        return None

    def may_close(self, arrived: int, missing: int) -> bool:
        """Tell whether a round may close with so many updates, before the longest wait, without those that it
        would wait for."""
        return True

    def may_evaluate(self, session: Session, round: int) -> bool:
        """Tell whether a ready peer may compute a part of the final evaluation. If none may, all do."""
        return True

    def caught_up(self, session: Session) -> None:
        """Note a peer that says that it is ready, at the round `session.at`."""

    def resumed(self, session: Session) -> None:
        """Say again what a peer on a new connection may have missed."""

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        """Note a round that opens, and the samples of each session's lease."""

    def announce(self, ex: Exchange, session: Session) -> bytes:
        """Return the body for a member's Round; empty: none."""
        return b""

    def reported(self, session: Session, body: bytes, claims: Mapping[int, SampleRanges]) -> None:
        """Take the body of a member's Report, once its packet is here too.

        Args:
            body: empty where the peer has sent none.
            claims: the samples of each lease that the packet delivers.
        """

    def refusals(self, ex: Exchange) -> Mapping[str, str]:
        """Return whose updates are refused as the round closes, by name, and why: each is a strike."""
        return {}

    def counted(self, round: int, counted: Sequence[Counted]) -> Mapping[str, bytes]:
        """Return the body for the Committed of each session, once a round is in the ledger."""
        return {}

    def committed(self, accepted: AbstractSet[str]) -> None:
        """Note that a round has ended, with the updates of the peers of these names."""

    def session_ended(self, session: Session) -> None:
        """Forget a session."""

    def forget_key(self, key: str) -> None:
        """Forget the evidence on a key that was banned for it, or whose ban the host has lifted."""

    def peer_status(self, session: Session) -> Mapping[str, Any]:
        """Return its figures of a peer for `cocktail status --json`; they replace those of the same name."""
        return {}

    def status(self) -> Any:
        """Return its figures for `cocktail status --json`; None: it has none."""
