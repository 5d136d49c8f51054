"""What a peer keeps on its disk between two stays in a run: x_i, x', its optimizer's state and its round.

One safetensors file, tensors and text only. Each tensor's fingerprint is in the header, and a checksum of the
header: a file that was damaged is known before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.optim import Optimizer

from compress import fingerprint
from recipes.finetune import Peer, settle
from recipes.whole import write_whole

FORMAT = "1"
LOCAL, COMMON, OPTIMIZER = "x", "common", "optimizer"  # names of the tensors; optimizer.<parameter>.<what>


@dataclass(frozen=True)
class Stay:
    """Where a peer was when it left."""

    round: int
    fingerprint: int  # of x' of that round
    about: Mapping[str, str]  # what the caller noted


def size_of(peer: Peer) -> int:
    """Bytes that `keep` writes, but for a few thousand of names."""
    return sum(tensor.nbytes for tensor in tensors_of(peer).values())


def anything_of(peer: Peer) -> bool:
    """Has this peer something of its own: a residual, or an optimizer that has moved?"""
    return bool(peer.optimizer.state) or not torch.equal(peer.worker.x, peer.worker.common.vector)


def keep(peer: Peer, path: Path, about: Mapping[str, str]) -> None:
    """Write down a peer whose loop has ended, whole or not at all.

    Raises:
        ValueError: its model is not finite: nobody should go on from it.
        OSError: the disk.
    """
    settle(peer)
    tensors, common = tensors_of(peer), peer.worker.common
    if not bool(torch.isfinite(peer.worker.x).all()):
        raise ValueError("this peer's model holds values that are not finite")
    sums = {name: f"{fingerprint(tensor.reshape(-1)):016x}" for name, tensor in tensors.items()}
    stay = {"format": FORMAT, "round": str(common.round), "fingerprint": f"{common.fingerprint:016x}"}
    words = {**about, **stay, "sums": json.dumps(sums)}
    write_whole(path, tensors, {**words, "check": digest(words)})


def read(path: Path) -> Stay:
    """Where the peer was, once every tensor is known to be what was written.

    Raises:
        ValueError: the file is damaged, or not of this version.
        OSError: it cannot be read.
    """
    with opened(path) as file:
        stay, sums = header_of(file)
        for name, wanted in sums.items():
            tensor = file.get_tensor(name)
            if tensor.dtype != torch.float32 or f"{fingerprint(tensor.reshape(-1)):016x}" != wanted:
                raise ValueError(f"{name} is not what was written")
    if sums[COMMON] != f"{stay.fingerprint:016x}":
        raise ValueError("its x' is not of the round it names")
    return stay


def restore(peer: Peer, path: Path) -> None:
    """Bring a peer that was just built to where it was: x_i, x', its round, the optimizer. After `read`.

    Raises:
        ValueError: it is of a model of another shape; the peer is unchanged.
    """
    with opened(path) as file:
        stay, _ = header_of(file)
        check(peer, file)
        worker, common = peer.worker, peer.worker.common
        worker.x.copy_(file.get_tensor(LOCAL))
        common.vector.copy_(file.get_tensor(COMMON))
        common.round, common.fingerprint = stay.round, stay.fingerprint
        load_optimizer(peer.optimizer, file)


def restore_residual(peer: Peer, path: Path) -> None:
    """As `restore`, for a peer that has x' of a later round from elsewhere: x_i <- x' + what x_i - x' was.

    Raises:
        ValueError: as `restore`.
    """
    with opened(path) as file:
        check(peer, file)
        residual = file.get_tensor(LOCAL).sub_(file.get_tensor(COMMON))
        torch.add(peer.worker.common.vector, residual.to(peer.worker.x.device), out=peer.worker.x)
        load_optimizer(peer.optimizer, file)


# ---- small -------------------------------------------------------------------------------------------------


def digest(words: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()


def tensors_of(peer: Peer) -> dict[str, Tensor]:
    """x_i, x', and of the optimizer what it keeps for each parameter, by number."""
    tensors = {LOCAL: peer.worker.x, COMMON: peer.worker.common.vector}
    for number, state in peer.optimizer.state_dict()["state"].items():
        for what, value in state.items():
            tensors[f"{OPTIMIZER}.{number}.{what}"] = torch.as_tensor(value, dtype=torch.float32)
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file, open; what safetensors finds wrong with it is a ValueError."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as problem:
        raise ValueError(str(problem)) from problem


def header_of(file: Any) -> tuple[Stay, dict[str, str]]:
    """Who left when, and each tensor's fingerprint. Raises ValueError where it is not what was written."""
    about = dict(file.metadata() or {})
    if about.pop("check", "") != digest(about) or about.pop("format", "") != FORMAT:
        raise ValueError("its header is not what was written, or of another version")
    sums: dict[str, str] = json.loads(about.pop("sums"))
    if sorted(sums) != sorted(file.keys()):
        raise ValueError("it has not the tensors that were written")
    return Stay(int(about.pop("round")), int(about.pop("fingerprint"), 16), about), sums


def check(peer: Peer, file: Any) -> None:
    """Raises ValueError where the file is not of this peer's model and optimizer."""
    n, parameters = peer.flat.layout.size, parameters_of(peer.optimizer)
    for name in file.keys():  # noqa: SIM118 - not a dict
        shape, want = tuple(file.get_slice(name).get_shape()), list[tuple[int, ...]]([(n,)])
        if name.startswith(OPTIMIZER + "."):
            number = int(name.split(".")[1])
            want = [(), tuple(parameters[number].shape)] if number < len(parameters) else []
        if shape not in want:
            raise ValueError(f"{name} has the shape {shape}, not one of {want}")


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """By the numbers that its state has them under."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(optimizer: Optimizer, file: Any) -> None:
    """The state alone: groups and rates are the recipe's and the schedule's."""
    state: dict[int, dict[str, Tensor]] = {}
    for name in file.keys():  # noqa: SIM118 - not a dict
        if name.startswith(OPTIMIZER + "."):
            _, number, what = name.split(".", 2)
            state.setdefault(int(number), {})[what] = file.get_tensor(name)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
