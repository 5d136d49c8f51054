"""The history of a run, as dashboard and report show it. It holds no secret.

run_folder_reader.py reads one from a run's folder, remote_reader.py builds one from its hub's answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cocktail_cli.ui import events

BYTES_FP16 = 2  # bytes of one parameter
# fields of Contribution that are sums
SUMS = ("samples", "rounds", "left_out", "up", "down", "fetched", "compute_s", "wait_s")
STAYS = 2000  # presences remembered; the oldest are dropped first
SAMPLES = 400  # samples remembered, likewise
SLOW = 400  # culprits, likewise
WINDOW = 5  # rounds that a point of the curve of speed is averaged over
LATELY = 20  # rounds of the figure of speed


@dataclass(frozen=True)
class Round:
    """One round; sums are over its members."""

    round: int
    step: int
    at: float  # time of its commit, seconds since 1970
    seconds: float  # seconds it took
    loss: float | None  # None: no new gradient was delivered
    members: tuple[str, ...]
    left_out: tuple[str, ...] = ()  # members whose packet was late, or refused
    up: int = 0  # bytes exchanged, all members to the hub; 0: not known
    down: int = 0  # excludes downloads before members were ready
    compute_s: float = 0.0  # seconds of their last steps
    wait_s: float = 0.0  # seconds their devices then waited for the exchange
    local_steps: int = 1  # optimizer steps: FP16 would have been sent as often
    tokens: int = 0  # trained tokens that it counted
    lr: float | None = None  # learning rate; None: unknown
    grad_norm: float | None = None  # before clipping, median over the peers
    rewards: Mapping[str, float] = field(default_factory=dict)  # of preference pairs, by TRL's names

    @property
    def idle(self) -> float | None:
        """Share of a step that devices spent waiting for the exchange."""
        whole = self.compute_s + self.wait_s
        return self.wait_s / whole if whole > 0 else None

    def fp16(self, parameters: int) -> int:
        """Bytes that all parameters take in FP16, both ways."""
        return 2 * BYTES_FP16 * parameters * len(self.members) * self.local_steps

    def ratio(self, parameters: int) -> float | None:
        """Compression ratio: bytes in FP16 over bytes exchanged."""
        moved = self.up + self.down
        full = self.fp16(parameters)
        return full / moved if moved and full else None


@dataclass(frozen=True)
class Evaluation:
    round: int
    step: int
    loss: float  # of the global model, on held-out data
    rewards: Mapping[str, float] = field(default_factory=dict)  # of preference pairs, by TRL's names


@dataclass(frozen=True)
class Generation:
    """A text of the held-out data, continued by the global model of a step."""

    step: int
    prompt: str
    text: str
    reference: str = ""


@dataclass(frozen=True)
class Presence:
    """A peer's time in the run, from joining to leaving."""

    peer: str
    joined: float  # seconds since 1970
    ready: float | None = None  # since when it takes part; None: not yet, or unknown
    left: float | None = None  # None: still present
    reason: str = ""


@dataclass(frozen=True)
class Contribution:
    """One peer's contribution to the run."""

    peer: str
    hardware: str = ""
    part: float = 0.0  # share of the work
    samples: int = 0  # samples counted; 0: unknown
    rounds: int = 0  # rounds that contain its packet
    left_out: int = 0  # rounds without its packet, though it was a member
    up: int = 0  # bytes
    down: int = 0
    fetched: int = 0  # part of `down`: model and packets, before it was ready
    compute_s: float = 0.0
    wait_s: float = 0.0

    def since(self, before: Contribution | None) -> Contribution:
        """Subtract an earlier state; a peer that was absent or has rejoined counts in full."""
        if before is None or before.up > self.up:
            return self
        had = {name: getattr(self, name) - getattr(before, name) for name in SUMS}
        return replace(self, **had)


@dataclass(frozen=True)
class About:
    """Facts of a run that are known from its start."""

    run: str
    recipe: str = ""  # the recipe's name
    recipe_hash: str = ""
    recipe_text: str = ""  # YAML, without paths of the host's machine
    model: str = ""
    data: tuple[str, ...] = ()
    method: str = ""  # "Full fine-tune", "LoRA adapters"
    base_sha256: str = ""
    data_sha256: str = ""
    parameters: int = 0  # trained parameters; 0: unknown
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunHistory:
    about: About
    state: str  # a key of report_page.STATES
    step: int = 0
    steps: int = 0
    started: float | None = None  # seconds since 1970
    seen: float | None = None  # time of the newest entry
    rounds: tuple[Round, ...] = ()
    before: tuple[tuple[int, float], ...] = ()  # (step, loss) of rounds before the first answer
    evaluations: tuple[Evaluation, ...] = ()
    samples: tuple[Generation, ...] = ()  # oldest first
    bottleneck: str = ""  # the line that bounds the newest rounds, or "the compute"; empty: unknown
    slow: tuple[events.Culprit, ...] = ()  # oldest first
    stages: tuple[str, ...] = ()  # sentences: which machines have which layers
    stays: tuple[Presence, ...] = ()
    contributions: tuple[Contribution, ...] = ()  # largest share first
    note: str = ""  # a remark to the reader
    reason: str = ""  # reason of the end

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(step, loss) of all rounds that trained."""
        trained = ((r.step, r.loss) for r in self.rounds if r.loss is not None)
        return [(float(step), loss) for step, loss in (*self.before, *trained)]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation of the lowest loss; the first of several."""
        return min(self.evaluations, key=lambda one: (one.loss, one.step), default=None)

    @property
    def speeds(self) -> list[tuple[float, float]]:
        """(step, trained tokens a second) of the rounds that trained, each with the WINDOW - 1 before it.

        A single round can be over at once: peers may have computed before it opened.
        """
        trained = [r for r in self.rounds if r.tokens and r.seconds > 0]
        ends = range(1, len(trained) + 1)
        return [(float(trained[i - 1].step), speed_of(trained[max(0, i - WINDOW) : i])) for i in ends]

    @property
    def recent_speed(self) -> float:
        """Trained tokens a second of the last LATELY rounds that trained."""
        return speed_of([r for r in self.rounds if r.tokens and r.seconds > 0][-LATELY:])

    @property
    def present(self) -> list[str]:
        return sorted({stay.peer for stay in self.stays if stay.left is None})


def speed_of(rounds: Sequence[Round]) -> float:
    """Compute the trained tokens a second of these rounds together."""
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)


def ranked(by_peer: Mapping[str, Contribution], work: Mapping[str, int]) -> tuple[Contribution, ...]:
    """Set each peer's share of the work; the largest comes first."""
    whole = sum(work.values()) or 1
    parts = (replace(one, part=work[peer] / whole) for peer, one in by_peer.items())
    return tuple(sorted(parts, key=lambda one: (-one.part, one.peer)))
