"""What a run requires of a machine (`swarm.requires`), beside what this one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure
from cocktail_cli.machine import memory_of
from cocktail_cli.ui import megabytes

from .base_weights import room

if TYPE_CHECKING:
    from recipes.config import Recipe

NOMINAL = 0.92  # of a size as it is sold that a program can have: 24 GB cards give 22 to 23.6 GiB


@dataclass(frozen=True)
class Has:
    """This machine. 0: not known, so not held against it."""

    memory: int  # bytes of the device that trains
    disk: int  # bytes free where models are fetched to
    rate: float  # bytes a second, the lower of up and down

    @classmethod
    def here(
        cls,
        devices: Sequence[str],
        held: int = 0,
        *rates: float | None,
        vram: int | None = None,
        disk: int | None = None,
    ) -> Has:
        """
        Args:
            devices: that train together.
            held: bytes of what is to be fetched that are on the disk already.
            rates, vram, disk: what this machine's owner allows, as far as he says; `vram` of each device.
        """
        memory = sum(min(memory_of(device), vram or memory_of(device)) for device in set(devices))
        return cls(memory, room(disk) + held, min((rate for rate in rates if rate), default=0.0))


def lacking(recipe: Recipe, has: Has) -> list[str]:
    """What of it this machine has too little of, in words."""
    wants, found = recipe.swarm.requires, list[str]()
    if wants is None:
        return found
    if wants.vram and has.memory and has.memory < NOMINAL * wants.vram:
        found.append(f"{megabytes(wants.vram)} of memory needed, {megabytes(has.memory)} here")
    if wants.disk and has.disk < wants.disk:
        found.append(f"{megabytes(wants.disk)} of disk needed, {megabytes(max(0, has.disk))} free")
    if wants.bandwidth_mbps and has.rate and 8e-6 * has.rate < wants.bandwidth_mbps:
        found.append(f"{wants.bandwidth_mbps:g} Mbit/s needed, {8e-6 * has.rate:g} allowed here")
    return found


def check(recipe: Recipe, has: Has) -> None:
    """Raises Failure (rejected) where this machine falls short."""
    if short := lacking(recipe, has):
        hints = ("cocktail recipes list --fits says what this machine can do",)
        raise Failure(
            "rejected", f"the run requires more than this machine has: {'; '.join(short)}", hints=hints
        )


def needs(recipe: Recipe) -> str:
    """`24 GB 20 Mbit`: for a column."""
    wants = recipe.swarm.requires
    if wants is None:
        return "-"
    parts = [f"{wants.vram / 1e9:.0f} GB"] if wants.vram else []
    parts += [f"{wants.bandwidth_mbps:g} Mbit"] if wants.bandwidth_mbps else []
    return " ".join(parts) or "-"
