"""The limits that a volunteer sets, and the check against a run's requirements (`swarm.requires`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line
from cocktail_cli.machine import hardware, memory_of
from cocktail_cli.ui import megabytes

from .base_weights import free_bytes

if TYPE_CHECKING:
    from recipes.config import Recipe

CONNECT_TIMEOUT = 5.0  # seconds for the hub to answer, where the caller's patience is shorter
NOMINAL = 0.92  # share of a size as sold that programs can have: 24 GB cards give 22 to 23.6 GiB


@dataclass(frozen=True)
class VolunteerLimits:
    """The options by which a user limits what this machine lends to a run."""

    name: str
    devices: Sequence[str]  # several: one peer is spread over them
    micro_batch_size: int | None = None  # None: the recipe decides
    max_up: float | None = None  # bytes a second
    max_down: float | None = None
    listen: str | None = None  # "host:port" where other peers reach this machine
    advertise: str | None = None  # the same, as the others dial it
    vram_limit: int | None = None  # bytes of each GPU
    max_disk: int | None = None  # bytes that the cache may grow to, checkpoints and what waits included
    trust_remote_code: bool = False
    machines: int = 1  # that are one peer, this one the first; 0: it is not known yet how many

    @property
    def hardware(self) -> str:
        one = hardware(self.devices[0], len(self.devices))
        return one if self.machines < 2 else f"{self.machines} machines, the first {one}"


@dataclass(frozen=True)
class Resources:
    """The resources that a run can use here. 0: unknown, which never excludes this machine."""

    memory: int  # bytes, of all devices that train
    disk: int  # bytes free where models are fetched to
    rate: float  # bytes a second, the lower of up and down
    fetched: int = 0  # bytes of the base model that are on the disk already

    @classmethod
    def of(cls, limits: VolunteerLimits, fetched: int = 0) -> Resources:
        """Measure this machine within its limits."""
        memory = sum(min(memory_of(d), limits.vram_limit or memory_of(d)) for d in set(limits.devices))
        return cls.of_memory(memory, limits, fetched)

    @classmethod
    def of_memory(cls, memory: int, limits: VolunteerLimits, fetched: int = 0) -> Resources:
        """Measure all but the memory of the devices, which needs torch."""
        rates = [rate for rate in (limits.max_up, limits.max_down) if rate]
        memory = memory if limits.machines == 1 else 0  # nobody knows that of the others
        return cls(memory, free_bytes(limits.max_disk), min(rates, default=0.0), fetched)

    def check(self, recipe: Recipe, given: object = None) -> None:
        """Raise Failure (rejected) where they fall short of a run, or its peers bring their models, and this
        one is given none."""
        if (invitation := recipe.objective.invitation) and given is None:
            hints = (one_line(invitation, 300),)
            raise Failure("rejected", "this run's peers bring model, data and loop", hints=hints)
        if short := lacking(recipe, self):
            hints = ("cocktail recipes list --fits says what this machine can do",)
            why = f"the run requires more than this machine has: {'; '.join(short)}"
            raise Failure("rejected", why, hints=hints)


def lacking(recipe: Recipe, have: Resources) -> list[str]:
    """Describe each requirement of the recipe that this machine does not meet."""
    wants, found = recipe.swarm.requires, list[str]()
    if wants is None:
        return found
    if wants.vram and have.memory and have.memory < NOMINAL * wants.vram:
        found.append(f"{megabytes(wants.vram)} of memory needed, {megabytes(have.memory)} here")
    if wants.disk and have.disk + have.fetched < wants.disk:
        free = max(0, have.disk + have.fetched)
        found.append(f"{megabytes(wants.disk)} of disk needed, {megabytes(free)} free")
    if wants.bandwidth_mbps and have.rate and 8e-6 * have.rate < wants.bandwidth_mbps:
        found.append(f"{wants.bandwidth_mbps:g} Mbit/s needed, {8e-6 * have.rate:g} allowed here")
    return found


def requirements_column(recipe: Recipe) -> str:
    """Shorten the requirements for a table's column: `24 GB 20 Mbit`."""
    wants = recipe.swarm.requires
    if wants is None:
        return "-"
    parts = [f"{wants.vram / 1e9:.0f} GB"] if wants.vram else []
    parts += [f"{wants.bandwidth_mbps:g} Mbit"] if wants.bandwidth_mbps else []
    return " ".join(parts) or "-"
