"""Errors of this room. A class's docstring is the user's first line, the message has the particulars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .messages import Over, Round


class TransportError(Exception):
    """Something between this machine and the others went wrong."""

    def __init__(self, said: str, hints: Sequence[str] = ()) -> None:
        super().__init__(said)
        self.hints = tuple(hints)  # remedies, where who raises it knows any


class UrlError(TransportError):
    """The run URL cannot be used, or an address, or another URL of a machine."""


class AddressInUse(TransportError):
    """The address the hub should listen on cannot be had."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")
        self.host, self.port = host, port


SLOW_HUB_S = 15.0  # for which a hub that takes connections is dialled longer than the caller asks


class Unreachable(TransportError):
    """The hub cannot be reached."""

    def __init__(self, host: str, port: int, layer: str, reason: str, *hints: str) -> None:
        super().__init__(reason, hints)
        self.host, self.port = host, port
        self.layer = layer  # what failed: "dns", "tcp", "handshake" or "key", or as an extension calls it

    @property
    def patience(self) -> float:
        """Return the seconds for which this is worth dialling on, beyond those that the caller gives it."""
        return SLOW_HUB_S if self.layer == "handshake" else 0.0

    @classmethod
    def of(cls, failed: Sequence[Unreachable]) -> Unreachable:
        """Return one error that names why each way failed; it is of the kind of the first."""
        first, said = failed[0], dict.fromkeys(map(str, failed))
        return cls(first.host, first.port, first.layer, "; ".join(said), *first.hints)


class RefusedByHub(TransportError):
    """The hub refused."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code  # as in messages.Refused


class LinkLost(TransportError):
    """The connection to the hub is lost."""


class RolledBack(LinkLost):
    """The hub that took over lacks a round that this peer has applied: it joins anew."""


class NotServed(TransportError):
    """The hub cannot give what a peer needs to catch up."""


class RunOver(TransportError):
    """The run is over."""

    def __init__(self, reason: str, finished: bool, resumable: bool = False) -> None:
        super().__init__(reason)
        self.finished = finished  # True: it reached its end
        self.resumable = resumable  # it failed and may be started again

    @classmethod
    def of(cls, over: Over) -> RunOver:
        return cls(over.reason, over.finished, over.resumable)


class SessionRenewed(TransportError):
    """The hub gave this peer a new session.

    The leases of the old one are void: other peers do that work. The peer keeps its local and global model,
    catches up to `link.welcome.round` if it is behind, calls ready() and goes on.
    """


class AnnouncedAnew(TransportError):
    """A round was announced again, otherwise than before: what was exchanged for it is void."""

    def __init__(self, round: Round) -> None:
        super().__init__(f"round {round.round} is announced anew, and otherwise than before")
        self.round = round


class Leaving(TransportError):
    """Interrupted, because this peer was asked to leave."""

    arrived: bool | None = False  # True if the hub has the packet and will use it; None: not known


class ProtocolError(TransportError):
    """Bytes that do not follow the protocol, or numbers that no honest sender would name."""


class TooLong(ProtocolError):
    """An object is announced with more bytes than it can have: nothing of it is kept."""


class NoRoom(TransportError):
    """This machine's disk has no room for what a run wants to be kept there."""


class LedgerError(TransportError):
    """The ledger cannot be used."""


class LedgerDamaged(LedgerError):
    """The ledger is damaged, and cannot be mended from what is left."""


class LedgerBusy(LedgerError):
    """Another process writes this ledger."""


class UpdateRejected(Exception):
    """One peer's packet cannot be used; the round goes on without it."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer, self.reason = peer, reason
