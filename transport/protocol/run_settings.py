"""A hub's caller gives it these: settings of the run, in seconds and bytes, and the HubDelegate, which does
what the hub leaves to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from .messages import File


@dataclass(frozen=True)
class Rung:
    """One setting of a run's rounds, as far as the hub has to know it; the recipe has the rest."""

    # steps whose compute an exchange of the recipe's own packets takes; where it is above, the next rung fits
    need: float = 1.0
    local_steps: int = 1
    peers: int = 1  # members of its rounds, at least
    words: str = ""  # what it is, for people


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run. The recipe is opaque here: a text and its hash."""

    run: str
    recipe: str  # resolved recipe, JSON
    recipe_hash: str  # sha256 of that text, hex
    samples: int  # each of 0 .. samples-1 is counted once, then the run is over
    global_batch: int  # samples of a step, all members together
    # settings of a round, on which lines and members decide (leases.py), from the most bytes to the fewest
    rungs: tuple[Rung, ...] = (Rung(),)
    cost: Callable[[int], float] | None = None  # of a sample's compute, by its id; None: all cost the same
    base: tuple[File, ...] = ()  # files of the base model
    parameters: int = 0
    needs: dict[str, int] = field(default_factory=dict)  # bytes that a joiner is told of, by what needs them
    licence: str = ""  # of the base model, for joiners
    longest_lease: int = 1  # maximum rounds of the lease of a slow peer
    # of a term of the loss, then of each further figure of the run's objective, as it states them
    bounds: tuple[tuple[float, float], ...] = ((-1e30, 1e30),)
    # (part, parts) -> terms of the loss in that part of the evaluation set; None: not known here
    eval_terms: Callable[[int, int], int] | None = None
    eval: bool = False  # there is an evaluation set
    eval_every: int = 0  # steps; 0: only at start and end
    # name -> version; a peer with another one is refused
    versions: dict[str, str] = field(default_factory=dict)
    # name -> hash; a peer whose Ready names another one is refused
    holds: dict[str, str] = field(default_factory=dict)
    join: str = "token"  # "approve": the host approves each new peer, beside the token
    own_key: str = ""  # key of the host's own peers, which need no approval
    min_peers: int = 1
    first_peers: int = 1  # the first round waits for this many, at most `first_s`
    first_s: float = 60.0
    guests: int = 0  # of first_peers: those that the host waits for, as long as for min_peers
    max_peers: int | None = None
    start_timeout: float = 1800.0  # wait for min_peers, then end with exit code 7
    # the longest a round waits, times its local steps; StragglerDeadline is as a rule earlier
    step_timeout: float = 600.0
    lease_timeout: float | None = None  # without a delivery a live peer is dropped; None: 3 longest rounds
    peer_timeout: float = 30.0  # silence after which a peer is dropped
    ping_s: float = 1.0
    grace_s: float = 1.5  # for a peer to reconnect
    recover_s: float = 10.0  # for peers to reconnect after a restart of the hub, before the next round opens
    stop_s: float = 20.0  # to finish the exchange in flight when the host stops the run
    linger_s: float = 5.0  # to serve downloads after the run is over
    max_update: int = 0  # bytes of one update; 0: those of FP32 values and positions
    credit: int = 32  # chunks under way per peer and direction

    @property
    def first_wait_s(self) -> float:
        """Return the seconds that the first round waits for `first_peers`."""
        return self.start_timeout if self.guests else self.first_s

    @cached_property
    def steps(self) -> int:
        return -(-self.samples // self.global_batch)

    @cached_property
    def lease_s(self) -> float:
        longest = self.step_timeout * max(rung.local_steps for rung in self.rungs)
        return 3 * longest if self.lease_timeout is None else self.lease_timeout

    @cached_property
    def update_limit(self) -> int:
        return self.max_update or 8 * self.parameters + 2**20


class WeightedPacket(NamedTuple):
    """One peer's packet and its weight in the mean; of a handoff, its share of the mean."""

    peer: str
    packet: bytes
    weight: float


class HubDelegate(Protocol):
    """The model side of a run, implemented by the hub's caller.

    Threads: `samples` and `object` run in the reader thread, `arrived` in several, all others in the commit
    thread; none in the thread that does the I/O.
    """

    def samples(self, ids: Sequence[int]) -> bytes:
        """Return the payload of a lease: opaque here."""

    def tokens(self, ids: Sequence[int]) -> int:
        """Count the trained tokens of these samples."""

    def weight(self, ids: Sequence[int]) -> float:
        """Return the weight of the update that delivers these samples; 0: it delivers no work."""

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """Take an update that has arrived, to decode it before the round closes.

        `aggregate` gets this very object later, unless the update came too late. Only `aggregate` may refuse
        a packet.
        """

    def opens(self, size: int, rung: int) -> None:
        """Prepare for a round on a rung, before its members are told of it: limit aggregates from now on to
        `size` bytes, which all members can fetch beside their compute; 0: not known."""

    def aggregate(self, round: int, updates: Sequence[WeightedPacket]) -> bytes:
        """Aggregate: one packet from the updates, which are sorted by peer.

        Raises UpdateRejected, before any state has changed; it is called again without that peer.
        """

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """Merge a residual handoff into the error feedback; `share` is the peer's share of the mean. It goes
        out with the rounds aggregated from now on. Raises UpdateRejected, with nothing changed."""

    def committed(self, round: int, packet: bytes) -> None:
        """Note that `packet`, as aggregated, is durable."""

    def fingerprint(self, round: int) -> int:
        """Compute the fingerprint of the global model of `round` by folding the ledger, slowly."""

    def object(self, name: str) -> bytes | Path:
        """Return the object "base/<file>", "snapshot/<round>/model.safetensors", "hashes/<either>" or "eval".
        Raises KeyError where there is none such."""
