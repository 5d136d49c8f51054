"""Causes of a slow round, the evidence for each, and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .round_sample import PeerSample, Usual
from .sight import Moving, Sight

Cause = Literal[
    "asleep", "stopped", "silent", "memory", "thermal", "disk", "other load", "gpu load", "compute",
    "upload", "download", "clock", "aggregation",
]  # fmt: skip

REMEDIES: dict[Cause, str] = {
    "asleep": "keep that machine from sleeping: power settings, or the mains for a laptop",
    "stopped": "let its process run: SIGSTOP or a paused container freezes it, others may starve it",
    "silent": "see whether that machine is on, its process not stopped, and its line up",
    "memory": "end other programs there, or join with a smaller --micro-batch-size",
    "thermal": "cool that machine, or clean its fans; --max-temp pauses it before it is slowed down",
    "disk": "set COCKTAIL_HOME (a hub: -o) to a faster disk, or end what keeps that disk busy",
    "other load": "end other programs there, or raise its priority or its quota of cores",
    "gpu load": "end other programs on that GPU, or join with --only-idle",
    "compute": "see what slows its device; its share of the batch follows its speed within three rounds",
    "upload": "see who else sends on that line, and its Wi-Fi; compression.topk_ratio bounds its packets",
    "download": "see who else receives on that line, and its Wi-Fi; compression.topk_ratio bounds packets",
    "clock": "keep the clock of that machine right: timedatectl set-ntp true",
    "aggregation": "end other programs on the hub's machine, or take one with more cores",
}


@dataclass(frozen=True)
class Culprit:
    """A peer, or the hub, that lengthens rounds."""

    peer: str
    cause: Cause
    evidence: str
    lengthened: float  # what share longer the round was; 0: no longer (a clock that was set)
    round: int  # the newest that shows it
    since: int  # the first

    @property
    def remedy(self) -> str:
        return REMEDIES[self.cause]


def evidence_of(cause: Cause, sample: PeerSample, usual: Usual | None) -> str:
    """Describe what was measured, beside what is usual there."""
    seen = sample.sight if cause in SEEN else None
    said = SEEN[cause](seen) if seen is not None and seen.seconds(cause) else MEASURED[cause](sample)
    before = f", usually {seconds(usual.seconds)}" if usual is not None else ""
    resent = resent_by(cause, sample)
    return f"{said}{before}{f'; {resent:.0%} of its TCP segments were sent again' if resent >= LOSSY else ''}"


LOSSY = 0.02  # share of TCP segments sent again from which a line is said to lose some


def resent_by(cause: Cause, sample: PeerSample) -> float:
    """Return the share of TCP segments that were sent again, where the cause is the line; else 0."""
    if cause not in ("upload", "download") or sample.spent is None:
        return 0.0
    return sample.spent.resent / 1000


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def rate(size: int, took: float) -> str:
    return f" ({8e-6 * size / took:.2g} Mbit/s)" if size and took > 0 else ""


def _upload(sample: PeerSample) -> str:
    return f"its update took {seconds(sample.upload_s)}{rate(sample.up, sample.upload_s)} to arrive"


def _download(sample: PeerSample) -> str:
    took = sample.seconds("download") + sample.seconds("lease")
    return f"it fetched for {seconds(took)}{rate(sample.down, took)}"


def _compute(sample: PeerSample) -> str:
    many = f" for {sample.samples} samples" if sample.samples > 1 else ""
    return f"it computed for {seconds(sample.compute_s)}{many}"


def _stood(phase: str, what: str) -> Callable[[PeerSample], str]:
    """Describe a counter of the machine, as seconds of the peer's cycle."""
    return lambda sample: f"{what} for {seconds(sample.seconds(phase))} of {seconds(sample.seconds('cycle'))}"


def _pages(sample: PeerSample) -> str:
    faults = sample.spent.faults if sample.spent is not None else 0
    return f", and {faults:,} of its pages were read from disk" if faults else ""


MEASURED: dict[Cause, Callable[[PeerSample], str]] = {
    "asleep": _stood("slept", "that machine was suspended"),
    "stopped": _stood("stopped", "its process did not run"),
    "memory": lambda s: f"{_stood('memory', 'its tasks stood still for lack of memory')(s)}{_pages(s)}",
    "thermal": _stood("throttled", "its device was slowed down for heat or power"),
    "disk": lambda s: f"it waited for its disk for {seconds(max(s.seconds('io'), s.seconds('disk')))}",
    "other load": _stood("cpu_wait", "a thread that could run waited for a core"),
    "gpu load": _stood("gpu_wait", "other programs used its GPU"),
    "compute": _compute,
    "upload": _upload,
    "download": _download,
    "clock": lambda s: (
        f"its clock was set {abs(s.seconds('clock')):,.0f} s "
        f"{'forward' if s.seconds('clock') > 0 else 'back'}"
    ),
}


def _silent(sight: Sight) -> str:
    nor = ", and what it is sent is not acknowledged" if sight.dark else ""
    return f"nothing has come from it for {seconds(sight.silent)}{nor}"


def _slowly(what: str, moving: Moving | None) -> str:
    """Describe what is on its way; it is only called where something is."""
    assert moving is not None
    part = f"{moving.came / 1000:.0f}{f' of {moving.size / 1000:.0f}' if moving.size else ''} kB"
    return f"{part} of {what} in {seconds(moving.seconds)}{rate(moving.came, moving.seconds)}"


SEEN: dict[Cause, Callable[[Sight], str]] = {
    "silent": _silent,
    "stopped": lambda s: (
        f"its machine acknowledges what it is sent, its process has said nothing for {seconds(s.silent)}"
    ),
    "upload": lambda s: _slowly("its update have come", s.up),
    "download": lambda s: _slowly("what it was sent are acknowledged", s.down),
}
