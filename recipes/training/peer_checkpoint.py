"""The checkpoint of a peer, between two sessions in a run: x_i, x', its optimizer's state and its round.

One safetensors file, tensors and text only. Each tensor's fingerprint is in the header, and a checksum of the
header: a damaged file is known before anything of it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recipes.hardware import host_memory
from recipes.weight_files import CHECK, SUMS, damaged_part, sum_of, write_with_sums

from .loop import settle
from .trainer import GRADIENT_CHUNK, LOCAL, OPTIMIZER, Lazy
from .types import Peer

FORMAT = "1"
GLOBAL_MODEL = "common"  # name of x' in the file, beside those of the trainer
Runs = Callable[[Callable[[], None]], object]  # runs a function, perhaps in another process
LONG = 4 << 30  # bytes: a disk takes some seconds to write more
TABLE = 256  # elements that an optimizer of 8 bits keeps beside each parameter


@dataclass(frozen=True)
class CheckpointHeader:
    """Round and fingerprint of a peer when it left."""

    round: int
    fingerprint: int  # of x' of that round
    about: Mapping[str, str]  # what the caller noted


def size_of(peer: Peer, optimizer: bool = True) -> int:
    """Estimate the bytes that `keep` writes, but for a few thousand of names; with the optimizer's state, or
    without."""
    tensors = tensors_of(peer)
    return sum(tensors[name].nbytes for name in (tensors if optimizer else residual_of(tensors)))


def anything_of(peer: Peer) -> bool:
    """Has this peer something of its own: a residual, or an optimizer with state?"""
    return peer.trainer.stepped or peer.worker.residual_norm() != 0


def keep(peer: Peer, path: Path, about: Mapping[str, str], by: Runs | None = None, most: float = inf) -> None:
    """Save a peer whose loop has ended. A long checkpoint is written twice, first without the optimizer's
    state: whoever is killed meanwhile has that, and a file is whole or not there.

    Args:
        by: has it written from the host's memory, by another process for instance. Where that memory has no
            room for it, it is written at once.
        most: bytes that it may take; the optimizer's state is left out where it does not fit.

    Raises:
        ValueError: its model is not finite: no peer should go on from it.
        OSError: the disk.
    """
    settle(peer)
    tensors, global_model = tensors_of(peer), peer.worker.global_model
    if not isfinite(peer.worker.residual_norm()):
        raise ValueError("this peer's model holds values that are not finite")
    stay = {
        "format": FORMAT,
        "round": str(global_model.round),
        "fingerprint": f"{global_model.fingerprint:016x}",
    }
    size, files = size_of(peer), [residual_of(tensors), list(tensors)]
    files = files[:1] if size > most else files if size > LONG else files[1:]
    if by is not None and size <= host_memory().free:
        tensors = {name: tensors[name].cpu() for name in files[-1]}

    def write() -> None:
        for names in files:
            part = Lazy({name: partial(tensors.__getitem__, name) for name in names})
            write_with_sums(path, part, {**about, **stay})

    if by is None or isinstance(tensors, Lazy):
        write()
    else:
        by(write)


def read(path: Path) -> CheckpointHeader:
    """Read the header of a checkpoint, and verify every tensor.

    Raises:
        ValueError: the file is damaged, or not of this version.
        OSError: it cannot be read.
    """
    with opened(path) as file:
        stay, sums = header_of(file)
        for name, wanted in sums.items():
            tensor = file.get_tensor(name)
            if tensor.dtype != torch.float32 or sum_of(tensor) != wanted:
                raise ValueError(f"{name} is not what was written")
    if sums[GLOBAL_MODEL] != f"{stay.fingerprint:016x}":
        raise ValueError("its x' is not of the round it names")
    return stay


def restore(peer: Peer, path: Path) -> None:
    """Restore a peer that was just built: x_i, x', its round, the optimizer. After `read`.

    Raises:
        ValueError: the checkpoint is of a model of another shape; the peer is unchanged.
    """
    with opened(path) as file:
        stay, _ = header_of(file)
        check(peer, file)
        global_model = peer.worker.global_model
        # first: x_i may be kept as what it is more than that
        global_model.vector.copy_(file.get_tensor(GLOBAL_MODEL))
        peer.trainer.load(own(file))
        global_model.round, global_model.fingerprint = stay.round, stay.fingerprint


def restore_residual(peer: Peer, path: Path) -> None:
    """Restore the residual of a peer that has x' of a later round from elsewhere: x_i <- x' + what x_i - x'
    was.

    Raises:
        ValueError: as `restore`.
    """
    with opened(path) as file:
        check(peer, file)
        x = partial(moved, file, peer.worker.global_model.vector)
        peer.trainer.load(Lazy({**own(file).made, LOCAL: x}))


# ---- small -------------------------------------------------------------------------------------------------


def tensors_of(peer: Peer) -> Mapping[str, Tensor]:
    """List x', x_i, and the optimizer's state of each parameter, by name."""
    local, global_model = peer.trainer.tensors(), peer.worker.global_model.vector
    return Lazy(
        {GLOBAL_MODEL: lambda: global_model} | {name: partial(local.__getitem__, name) for name in local}
    )


def residual_of(tensors: Iterable[str]) -> list[str]:
    """Name the tensors that make the residual: x' and x_i."""
    return [name for name in tensors if not name.startswith(OPTIMIZER)]


def own(file: Any) -> Lazy:
    """List the trainer's tensors in a file."""
    names = [name for name in file.keys() if name != GLOBAL_MODEL]  # noqa: SIM118 - not a dict
    return Lazy({name: partial(file.get_tensor, name) for name in names})


def moved(file: Any, global_model: Tensor) -> Tensor:
    """Add the residual x_i - x' of the file to x' of a later round."""
    x: Tensor = file.get_tensor(LOCAL).sub_(file.get_tensor(GLOBAL_MODEL))
    for start in range(0, len(x), GRADIENT_CHUNK):  # in the host's memory: a device has no room for it
        x[start : start + GRADIENT_CHUNK] += global_model[start : start + GRADIENT_CHUNK].cpu()
    return x


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a checkpoint; what safetensors finds wrong with it is a ValueError."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as problem:
        raise ValueError(str(problem)) from problem


def header_of(file: Any) -> tuple[CheckpointHeader, dict[str, str]]:
    """Read the header and each tensor's fingerprint. Raises ValueError where it is damaged."""
    about = dict(file.metadata() or {})
    if damaged_part(about, {}) or about.get("format") != FORMAT:
        raise ValueError("its header is not what was written, or of another version")
    sums: dict[str, str] = json.loads(about.pop(SUMS))
    if sorted(sums) != sorted(file.keys()):
        raise ValueError("it has not the tensors that were written")
    del about[CHECK], about["format"]
    return CheckpointHeader(int(about.pop("round")), int(about.pop("fingerprint"), 16), about), sums


def check(peer: Peer, file: Any) -> None:
    """Compare a file with this peer's model and optimizer. Raises ValueError."""
    shapes = {GLOBAL_MODEL: (peer.trainer.layout.size,), **peer.trainer.shapes()}
    for name in file.keys():  # noqa: SIM118 - not a dict
        parameter = name.rpartition(".")[0] or name  # of which an optimizer may keep a number, too
        shape, want = tuple(file.get_slice(name).get_shape()), shapes.get(parameter)
        fits = shape == want
        if name.startswith(OPTIMIZER) and want is not None:
            fits = prod(shape) <= max(prod(want), TABLE)  # of 8 bits: packed, with scales and a table
        if not fits:
            raise ValueError(f"{name} has the shape {shape}, not {want}")
