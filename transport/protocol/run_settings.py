"""What a hub must know about its run. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .messages import File


@dataclass(frozen=True)
class RunSettings:
    """One run, as its hub sees it. The recipe is opaque here: a text and its hash."""

    run: str
    recipe: str  # resolved recipe, JSON
    recipe_hash: str  # sha256 of that text, hex
    samples: int  # the run counts each of 0 .. samples-1 once, then it is over
    global_batch: int  # samples of a step, all members together
    local_steps: int = 1  # steps of a round
    base: tuple[File, ...] = ()  # files of the base model
    parameters: int = 0
    shards: int = 1  # of the vector; Work knows which is which
    owners: str = "hub"  # "peers": those that can be reached own the shards
    longest_lease: int = 1  # rounds that the lease of a slow peer may last
    eval: bool = False  # is there an evaluation set
    eval_every: int = 0  # steps; 0: only at the beginning and the end
    versions: dict[str, str] = field(default_factory=dict)  # a peer that names another one is refused
    holds: dict[str, str] = field(default_factory=dict)  # the same, of what it says with Ready: hashes
    join: str = "token"  # "approve": the owner says yes to each newcomer, beside the token
    own_key: str = ""  # of the owner's own peers, which need no yes
    min_peers: int = 1
    first_peers: int = 1  # the first round waits for so many, but no longer than `first_s`
    first_s: float = 60.0
    max_peers: int | None = None
    start_timeout: float = 1800.0  # to wait for min_peers before the run ends with exit code 7
    step_timeout: float = 600.0  # the longest a round waits; as a rule its deadline comes earlier (pace.py)
    lease_timeout: float | None = (
        None  # a live peer that delivers nothing for this long is dropped; 3 step_timeouts
    )
    peer_timeout: float = 30.0  # a silent peer is dropped
    ping_s: float = 1.0
    grace_s: float = 1.5  # to come back after a lost connection
    recover_s: float = 10.0  # to come back after the hub was restarted, before the next round opens
    stop_s: float = 20.0  # to finish the exchange in flight when the owner stops the run
    linger_s: float = 5.0  # to serve what peers still fetch after the run is over
    max_update: int = 0  # bytes of one update; 0: what FP32 values and positions would take
    credit: int = 32  # chunks under way per peer and direction

    @property
    def round_batch(self) -> int:
        """Samples leased per round, all members together."""
        return self.global_batch * self.local_steps

    @property
    def steps(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def lease_s(self) -> float:
        return 3 * self.step_timeout if self.lease_timeout is None else self.lease_timeout

    @property
    def update_limit(self) -> int:
        return self.max_update or 8 * self.parameters + 2**20


class HubDelegate(Protocol):
    """What a hub cannot know, implemented by its caller. `samples` and `object` are called from one thread,
    `arrived` from several, the others from another; none from the thread that does the I/O."""

    def samples(self, ids: Sequence[int]) -> bytes:
        """The payload of a lease: opaque here."""

    def tokens(self, ids: Sequence[int]) -> int:
        """Trained tokens in these samples: the weight of the update that delivers them."""

    def arrived(self, round: int, peer: str, packet: bytes) -> None:
        """A packet is here, whole: what can be done with it before the round closes may be done now. As a
        rule `aggregate` gets this very object; where it came too late, nobody says anything more about it.
        Whether it is a packet at all is for `aggregate` to tell."""

    def own(self, round: int, shards: Sequence[int], keep: Callable[[bytes], int]) -> bool:
        """From this round on the hub owns these shards. What the owner's half has of those that it owned
        before is for others to inherit: first it is kept, which gives it a number, then it is gone here.
        False: nothing is new, and no less in memory alone than before. Called only where peers may own, as
        `joined` and `restricted` are."""

    def fits(self, size: int) -> None:
        """From now on all members can fetch a packet of so many bytes beside their compute, and no more.
        Called only where they say so."""

    def aggregate(self, round: int, updates: Sequence[tuple[str, bytes, float]]) -> bytes:
        """The owner's half, of the shards the hub owns: one packet out of (peer, packet, weight), sorted by
        peer. Raises UpdateRejected; it is called again without that peer, so it must not have changed its
        state by then."""

    def joined(
        self,
        round: int,
        hubs: Sequence[int],
        own: bytes,
        parts: Sequence[tuple[str, Sequence[int], bytes]],
    ) -> bytes:
        """The packet of all shards: `own` of those of the hub, and (owner, its shards, packet) of peers that
        own. Raises UpdateRejected, which names the owner by what stands for it here."""

    def restricted(self, peer: str, packet: bytes, shards: Collection[int]) -> tuple[bytes, list[int]]:
        """What a peer's packet says of these shards alone, and of which it says something. Raises
        UpdateRejected."""

    def inherit(self, peer: str, packet: bytes, share: float) -> None:
        """What a peer that leaves has handed over; `share` of the mean is what its packets were. It goes out
        with the rounds that are aggregated from now on. Raises UpdateRejected, with nothing changed."""

    def committed(self, round: int, packet: bytes) -> None:
        """`packet`, as aggregated, is durable."""

    def fingerprint(self, round: int) -> int:
        """The fingerprint of x' of `round`, by folding the ledger: the truth, slowly."""

    def object(self, name: str) -> bytes | Path:
        """ "base/<file>", "snapshot/<round>/model.safetensors", "hashes/<either>" or "eval". Raises KeyError
        where there is none such."""
