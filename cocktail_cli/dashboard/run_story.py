"""The history of a run, as dashboard and report show it. It holds no secret.

run_folder_reader.py reads one from a run's folder, remote_reader.py builds one from its hub's answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

BYTES_FP16 = 2  # of one parameter
SUMS = ("samples", "rounds", "left_out", "up", "down", "fetched", "compute_s", "wait_s")  # of a Contribution
STAYS = 2000  # that are remembered; the first go first


@dataclass(frozen=True)
class Round:
    """One round; sums are over its members."""

    round: int
    step: int
    at: float  # of its commit, seconds since 1970
    seconds: float  # it took
    loss: float | None  # None: no new gradient was delivered
    members: tuple[str, ...]
    left_out: tuple[str, ...] = ()  # members whose packet was late, or refused
    up: int = 0  # bytes exchanged, all members to the hub; 0: not known
    down: int = 0  # without what members fetched before they were ready
    compute_s: float = 0.0  # of their last steps
    wait_s: float = 0.0  # that their devices then waited for the exchange
    local_steps: int = 1  # of the optimizer: so often FP16 would have gone over the line

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
    loss: float  # of x' on held-out data


@dataclass(frozen=True)
class Presence:
    """A peer's time in the run, from joining to leaving."""

    peer: str
    joined: float  # seconds since 1970
    ready: float | None = None  # from then on it held the model and took part; None: not yet, or not known
    left: float | None = None  # None: it is there
    reason: str = ""


@dataclass(frozen=True)
class Contribution:
    """One peer's contribution to the run."""

    peer: str
    hardware: str = ""
    part: float = 0.0  # of the work of all
    samples: int = 0  # counted; 0: not known
    rounds: int = 0  # with its packet in them
    left_out: int = 0  # rounds without it, though it was a member
    up: int = 0  # bytes
    down: int = 0
    fetched: int = 0  # of `down`: model and packets that it lacked, before it was ready
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
    recipe: str = ""  # its name
    recipe_hash: str = ""
    recipe_text: str = ""  # YAML, with no path of the owner's machine
    model: str = ""
    data: tuple[str, ...] = ()
    method: str = ""  # "Full fine-tune", "LoRA adapters"
    base_sha256: str = ""
    data_sha256: str = ""
    parameters: int = 0  # trained ones; 0: not known
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunHistory:
    about: About
    state: str  # a key of sheet.STATES
    step: int = 0
    steps: int = 0
    started: float | None = None  # seconds since 1970
    seen: float | None = None  # of the newest entry
    rounds: tuple[Round, ...] = ()
    before: tuple[tuple[int, float], ...] = ()  # (step, loss) of rounds of which no more is known
    evaluations: tuple[Evaluation, ...] = ()
    stays: tuple[Presence, ...] = ()
    contributions: tuple[Contribution, ...] = ()  # the largest part first
    note: str = ""  # what a reader of this one has to know
    reason: str = ""  # why it ended

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(step, loss) of all rounds that trained."""
        trained = ((r.step, r.loss) for r in self.rounds if r.loss is not None)
        return [(float(step), loss) for step, loss in (*self.before, *trained)]

    @property
    def present(self) -> list[str]:
        return sorted({stay.peer for stay in self.stays if stay.left is None})


def ranked(parts: Iterable[Contribution]) -> tuple[Contribution, ...]:
    return tuple(sorted(parts, key=lambda one: (-one.part, one.peer)))
