"""What the hub's machine asks of the shell around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.ledger import KnownPeer
from transport.protocol import AggregatorInfo, Event, HandoffOffer, Message, SampleRanges


@dataclass(frozen=True)
class Send:
    conn: bytes
    message: Message


@dataclass(frozen=True)
class Tell:
    """Yield this event to whoever runs the hub (`at` and the bytes are the shell's to fill in)."""

    event: Event


@dataclass(frozen=True)
class Enrol:
    """Write a new session into the ledger."""

    session: str
    name: str
    hardware: str
    key: str


@dataclass(frozen=True)
class Stand:
    """Write down how a key stands with the run."""

    known: KnownPeer


@dataclass(frozen=True)
class SayDurably:
    """Send this once all that was asked for before is in the ledger."""

    conn: bytes
    message: Message


@dataclass(frozen=True)
class Forget:
    """The session is over: strike it from the ledger, drop its uploads and connections."""

    session: str


@dataclass(frozen=True)
class GiveBack:
    """A lease is its session's no more: strike it from the ledger."""

    session: str
    round: int


@dataclass(frozen=True)
class Lease:
    """Write the leases of a round into the ledger, then call `leased(round)`."""

    round: int
    leases: dict[str, SampleRanges]  # by session
    shards: tuple[int, ...] = (0,)  # that the hub owns in this round
    owners: int = 0  # peers that own the others
    fits: int = 0  # bytes that its aggregate should not exceed; 0: not known


@dataclass(frozen=True)
class Claim:
    """One update that arrived in time, and the leases it delivers."""

    peer: str
    session: str
    leases: dict[int, SampleRanges]  # by the round that leased them
    loss_sum: float
    tokens: int  # the peer's word, for the mean loss only


@dataclass(frozen=True)
class Commit:
    """Aggregate these updates, make the round durable, then call `committed(CommitDone)` (or `failed`)."""

    round: int
    step: int
    members: tuple[str, ...]
    claims: tuple[Claim, ...]  # sorted by peer
    fingerprint: int
    hubs: tuple[int, ...] = (0,)  # the shards of the hub
    owners: dict[str, AggregatorInfo] = field(default_factory=dict)  # by session
    estates: tuple[HandoffOffer, ...] = ()  # what the hub is to add to its errors, once the round is durable


@dataclass(frozen=True)
class Inherit:
    """The owner takes over what a leaver has handed over, before it aggregates again."""

    session: str
    peer: str
    share: float  # of the mean
    to_all: bool = False  # where peers own: all owners are to have it


@dataclass(frozen=True)
class Reach:
    """See whether this session's door can be dialled, then call `reached`."""

    session: str
    address: str
    key: str


@dataclass(frozen=True)
class Unusable:
    """An owner cannot use what a peer has sent it: the round is closed again, without that peer."""

    owner: str  # session
    attempt: int
    peer: str
    reason: str


@dataclass(frozen=True)
class LoseOwner:
    """Nothing more is expected of this owner in the round that is being committed."""

    session: str


@dataclass(frozen=True)
class FindFingerprint:
    """Fold the ledger to the fingerprint of x' of `round`, then call `fingerprinted`."""

    round: int


@dataclass(frozen=True)
class Note:
    """Write a finished evaluation into the ledger."""

    round: int
    step: int
    loss: float
    tokens: int
    final: bool


@dataclass(frozen=True)
class End:
    """The run is over: serve what is still being fetched, then stop."""


Action = (
    Send
    | Tell
    | Enrol
    | Stand
    | SayDurably
    | Forget
    | GiveBack
    | Lease
    | Commit
    | Inherit
    | Reach
    | Unusable
    | LoseOwner
    | FindFingerprint
    | Note
    | End
)


@dataclass(frozen=True)
class CommitDone:
    """The shell's answer to Commit."""

    round: int
    size: int
    sha256: bytes
    packets: dict[str, int]  # bytes of each accepted packet, by peer: who is in the commit
    tokens: dict[str, int]  # trained tokens each delivered, by Work's word
    rejected: dict[str, str]  # peer -> why its packet could not be used
    lost: dict[str, str] = field(default_factory=dict)  # owner's session -> why nothing came of it
    denied: dict[str, str] = field(default_factory=dict)  # peer -> session of the owner that has refused it
    moved: dict[str, str] = field(default_factory=dict)  # owner's session -> digest of its packet in it

    def share(self, peer: str) -> float:
        """The weight of an accepted packet, of 1: as `HubDelegate.aggregate` was told the weights."""
        total = sum(self.tokens.values())
        return self.tokens[peer] / total if total else 1 / len(self.tokens)
