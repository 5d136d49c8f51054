"""Checkpoints of peers that left a run, stored for their return. `recipes.training` writes the tensors.

    COCKTAIL_HOME/kept/<run>/<peer>.safetensors                         16 bytes a parameter with Adam

A checkpoint is written after the goodbye, by a child that may outlive this process, and deleted once the peer
is back or hears that the run is over. Those of runs never heard of again are deleted after OLD_S. Any of them
may be deleted at any time: the peer then comes back without its residual.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.errors import hubs_fault
from cocktail_cli.machine import home, in_child, lock_of

from .base_weights import PLAIN, SPARE, digest_of

if TYPE_CHECKING:
    from recipes.training import Peer
    from transport.protocol import messages

LONGEST = 64  # characters of a peer's name that a hub may give
WRITTEN_S = 60.0  # seconds to wait for one that is still being written
OLD_S = 30 * 24 * 3600.0  # seconds after which no run is expected to go on

Warn = Callable[[str], None]


@dataclass(frozen=True)
class CheckpointKey:
    """The peer of a run that a checkpoint belongs to; no other can use it. Its fields are in the file."""

    run: str
    peer: str
    recipe: str  # hash
    base: str  # digest of the base model's files

    @classmethod
    def of(cls, welcome: messages.Welcome) -> CheckpointKey:
        return cls(welcome.run, welcome.name, welcome.recipe_hash, digest_of(welcome.base))

    @property
    def path(self) -> Path:
        return path_of(self.run, self.peer)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A verified checkpoint on the disk; restoring it deletes it, or a later crash would apply it twice."""

    path: Path
    round: int  # of its global model
    fingerprint: int  # of its global model

    def restore(self, peer: Peer, global_model: bool = True) -> None:
        """Load optimizer and residual, and the global model, unless `peer` has that of a later round."""
        from recipes.training import restore, restore_residual

        (restore if global_model else restore_residual)(peer, self.path)
        self.path.unlink(missing_ok=True)


def folder() -> Path:
    return home() / "kept"


def path_of(run: str, name: str) -> Path:
    """Return a checkpoint's path. Raises Failure (rejected) where the hub gives what is no name."""
    if not PLAIN.fullmatch(run) or not name.isprintable() or not 0 < len(name) <= LONGEST or "/" in name:
        word = name if PLAIN.fullmatch(run) else run
        raise hubs_fault(f"the hub gives the name {word[:80]!r}, which is none")
    return folder() / run / f"{file_name(name)}.safetensors"


def file_name(name: str) -> str:
    """Return a name that every file system takes: the peer's own, or ASCII letters of it and a hash."""
    if PLAIN.fullmatch(name):
        return name
    letters = re.sub(r"[^A-Za-z0-9-]+", "", name).strip("-") or "peer"
    return f"{letters}@{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def find(key: CheckpointKey, warn: Warn) -> StoredCheckpoint | None:
    """Find and verify this peer's checkpoint; None where there is none that it can use."""
    from recipes.training import read
    from transport.ledger import lock_exclusively
    from transport.protocol import LedgerBusy

    path = key.path
    if (lock := lock_of(path)).exists():  # the child of an earlier session writes it
        with suppress(LedgerBusy), closing(lock_exclusively(lock, WRITTEN_S)):
            lock.unlink()
    if not path.is_file():
        return None
    try:
        found = read(path)
    except (OSError, ValueError) as problem:
        warn(f"the checkpoint of {key.run} is damaged and removed ({problem}): it begins without a residual")
        path.unlink(missing_ok=True)
        return None
    if other := [name for name, value in asdict(key).items() if found.about.get(name) != value]:
        warn(f"the checkpoint {path} is of another {' and '.join(other)}: it is not used, and left alone")
        return None
    return StoredCheckpoint(path, found.round, found.fingerprint)


def store(peer: Peer, key: CheckpointKey, warn: Warn, most: int | None = None, patience: float = inf) -> int:
    """Store the checkpoint of a peer that has left, if it has state of its own; return its bytes.

    Where that fails, a warning says why. `most`: bytes that it may take. `patience`: seconds to wait for the
    child that writes it.
    """
    from recipes.training import is_full, peer_checkpoint
    from transport.ledger import lock_exclusively

    def locked(write: Callable[[], None]) -> None:
        with closing(lock_exclusively(lock_of(path))):
            write()
            lock_of(path).unlink()

    delete_old()
    if not peer_checkpoint.anything_of(peer):
        return 0
    path, size, least = key.path, peer_checkpoint.size_of(peer), peer_checkpoint.size_of(peer, False)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = shutil.disk_usage(path.parent).free
        if least + SPARE > room:
            raise ValueError(f"it takes {least / 1e9:.1f} GB, {room / 1e9:.1f} GB are free on {path.parent}")
        if most is not None and least > most:
            raise ValueError(f"it takes {least / 1e9:.1f} GB, --max-disk allows {most / 1e9:.1f} GB")
        room = room - SPARE if most is None else min(room - SPARE, most)
        if size > room:
            warn(f"its optimizer's state is not kept: it takes {(size - least) / 1e9:.1f} GB")
            size = least
        child = lambda write: in_child(partial(locked, write), patience)  # noqa: E731
        peer_checkpoint.keep(peer, path, asdict(key), child, room)
    except (OSError, ValueError, RuntimeError, MemoryError) as problem:
        if isinstance(problem, RuntimeError) and not is_full(problem):
            raise
        warn(f"this peer's residual is not kept: {problem}")
        return 0
    return path.stat().st_size if path.is_file() else size


def delete_run(run: str) -> None:
    """Delete all checkpoints of a run that is over."""
    shutil.rmtree(path_of(run, "any").parent, ignore_errors=True)


def delete_old() -> None:
    for path in folder().glob("*/*"):
        with suppress(FileNotFoundError):  # another peer of this machine did it
            if path.stat().st_mtime < time.time() - OLD_S:
                path.unlink()
