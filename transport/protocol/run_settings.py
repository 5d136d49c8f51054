"""Settings of a run for its hub. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .messages import File


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run. The recipe is opaque here: a text and its hash."""

    run: str
    recipe: str  # resolved recipe, JSON
    recipe_hash: str  # sha256 of that text, hex
    samples: int  # each of 0 .. samples-1 is counted once, then the run is over
    global_batch: int  # samples of a step, all members together
    # steps of a round: one number, or an ascending ladder on which the lines decide (step_ladder.py)
    local_steps: tuple[int, ...] = (1,)
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

    @property
    def steps(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def lease_s(self) -> float:
        longest = self.step_timeout * self.local_steps[-1]
        return 3 * longest if self.lease_timeout is None else self.lease_timeout

    @property
    def update_limit(self) -> int:
        return self.max_update or 8 * self.parameters + 2**20
