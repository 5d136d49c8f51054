"""A peer whose model is sharded over the GPUs of one machine (FSDP2): `--gpus N`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, Joining, PeerBuilder
from cocktail_cli.errors import Failure
from cocktail_cli.machine import devices_of, pick_device, split_devices

from .gpu_processes import GpuProcesses

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport import PeerLink


class MultiGpuExtension(Extension):
    """Spreads each peer of this machine over so many of its GPUs."""

    def devices_each(self, options: Mapping[str, Any]) -> int:
        return int(options["gpus"])

    def pick_devices(self, wanted: str, options: Mapping[str, Any]) -> Sequence[str]:
        return pick_devices(wanted, options["gpus"]) if options["gpus"] > 1 else ()

    def joining(self, options: Mapping[str, Any]) -> Joining | None:
        return Spread() if options["gpus"] > 1 else None


class Spread(Joining):
    """Builds a volunteer's peers over several devices."""

    def begin(self, devices: Sequence[str], warn: Callable[[str], None]) -> None:
        self.devices = devices

    def check(self, recipe: Recipe) -> None:
        from .fsdp_peer import check_fsdp

        check_fsdp(recipe)

    def builder(self, link: PeerLink, leave: Callable[[str], None], vram_limit: int | None) -> PeerBuilder:
        return GpuProcesses(self.devices, lambda: leave("rank lost"), vram_limit)


def pick_devices(wanted: str, count: int) -> list[str]:
    """Pick devices for the `count` processes of a peer. Raises Failure, as `pick_device` does."""
    if os.name == "nt":
        hints = ("use WSL 2, or start one peer for each GPU",)
        raise Failure("preflight", "--gpus: not on Windows, where NCCL is not", hints=hints)
    if wanted in ("auto", "cuda"):
        if (have := devices_of("cuda")) < count:
            hints = ("--device cpu tries it out on the processor",)
            raise Failure("preflight", f"--gpus {count}: this machine has {have} CUDA devices", hints=hints)
        wanted = "cuda:" + ",".join(map(str, range(count)))
    devices = [wanted] * count if wanted == "cpu" else split_devices(wanted)
    gpus = {device for device in map(pick_device, devices) if device.startswith("cuda")}
    if len(devices) != count or (len(gpus) < count and set(devices) != {"cpu"}):
        raise Failure("usage", f"--device {wanted}: expected {count} GPUs, for --gpus {count}")
    return [pick_device(device) for device in devices]


extension = MultiGpuExtension()
