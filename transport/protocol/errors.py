"""The errors of this room. A class's docstring is the user's first line, the message holds the particulars.

TransportError
    UrlError            the run URL cannot be used
    AddressInUse        the hub's port is taken
    Unreachable         no hub at that address: the name, the TCP connection or the key failed
    RefusedByHub        the hub answered, and its answer is no
    NotServed           the hub lacks, or has damaged, what a peer needs to catch up
    LinkLost            there was a session, and it cannot be had back
    RunOver             the run ended while the caller waited for something in it
    SessionRenewed      the session is a new one: work not delivered in the old one belongs to others now
    Reopened            the round is open again with other owners: what was cut for those before is void
    Leaving             the caller itself asked to leave, while it waited for something
    ProtocolError       bytes that are not this protocol
    LedgerError         the ledger is damaged, or not what its caller took it for
        LedgerBusy      another process writes this ledger
UpdateRejected          raised by the caller's `Work.aggregate`: one peer's packet cannot be used
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .messages import Over, Round


class TransportError(Exception):
    """Something between this machine and the others went wrong."""


class UrlError(TransportError):
    """The run URL cannot be used."""


class AddressInUse(TransportError):
    """The address the hub should listen on cannot be had."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}")
        self.host, self.port = host, port


class Unreachable(TransportError):
    """The hub cannot be reached."""

    def __init__(self, host: str, port: int, layer: str, reason: str) -> None:
        super().__init__(reason)
        self.host, self.port = host, port
        self.layer = layer  # "dns", "tcp" or "key": what failed, from the outside in


class RefusedByHub(TransportError):
    """The hub refused."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code  # a key of messages.REFUSALS


class LinkLost(TransportError):
    """The connection to the hub is lost."""


class NotServed(TransportError):
    """The hub cannot give what a peer needs to catch up."""


class RunOver(TransportError):
    """The run is over."""

    def __init__(self, reason: str, finished: bool, resumable: bool = False) -> None:
        super().__init__(reason)
        self.finished = finished  # True: it reached its end
        self.resumable = resumable  # it failed, and may be started again

    @classmethod
    def of(cls, over: Over) -> RunOver:
        return cls(over.reason, over.finished, over.resumable)


class SessionRenewed(TransportError):
    """The hub gave this peer a new session.

    The leases of the old one are void: others do that work. The peer keeps x and x', catches up to
    `link.welcome.round` if it is behind, says ready and goes on.
    """


class Reopened(TransportError):
    """A round is open again with other owners: cut the packet anew, and exchange it again."""

    def __init__(self, again: Round) -> None:
        super().__init__(f"round {again.round} is open again with other owners")
        self.again = again


class Leaving(TransportError):
    """Interrupted, because this peer was asked to leave."""

    arrived: bool | None = False  # is the packet under way at the hub, which will use it; None: not known


class ProtocolError(TransportError):
    """What came is not this protocol."""


class LedgerError(TransportError):
    """The ledger cannot be used."""


class LedgerBusy(LedgerError):
    """Another process writes this ledger."""


class UpdateRejected(Exception):
    """One peer's packet cannot be used; the round goes on without it. `by`: the session of the owner that
    says so, where that is a peer."""

    def __init__(self, peer: str, reason: str, by: str = "") -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer, self.reason, self.by = peer, reason, by
