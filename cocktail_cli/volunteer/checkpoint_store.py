"""What a peer that leaves keeps for its return: where, when and which. recipes/kept.py has the tensors.

    COCKTAIL_HOME/kept/<run>/<peer>.safetensors
    COCKTAIL_HOME/kept/<run>/<peer>@<16 digits of the hub's key>...     where it owns shards: kept_shards.py

One file for each peer of this machine and each run it left; 16 bytes a parameter with Adam. It is written
after the goodbye and deleted once the peer is back, or hears that the run is over. What is left of runs that
nobody heard of again goes after OLD_S. Any of it may be deleted at any time: the peer then comes back without
its residual.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure
from cocktail_cli.machine import home

from .base_weights import PLAIN, SPARE

if TYPE_CHECKING:
    from recipes.training import Peer

OLD_S = 30 * 24 * 3600.0  # seconds after which a run is not expected to go on

Told = Callable[[str], None]  # a warning


@dataclass(frozen=True)
class Kept:
    """A peer as it was when it left, whole on the disk."""

    path: Path
    round: int  # of its x'
    fingerprint: int  # of that

    def restore(self, peer: Peer) -> None:
        """x_i, x' of `round`, the optimizer; it is then no longer on the disk. The packets from `round` on
        are still to be applied.
        """
        from recipes.training import restore

        restore(peer, self.path)
        self.path.unlink(missing_ok=True)  # or a later crash would bring it back into the run twice

    def restore_residual(self, peer: Peer) -> None:
        """x_i - x' and the optimizer, where x' of a later round is in `peer` already."""
        from recipes.training import restore_residual

        restore_residual(peer, self.path)
        self.path.unlink(missing_ok=True)


def folder() -> Path:
    return home() / "kept"


def path_of(run: str, name: str) -> Path:
    """Raises Failure (rejected) where the names, which a hub gives, are none for a file."""
    for word in (run, name):
        if not PLAIN.fullmatch(word):
            raise Failure("rejected", f"the hub gives the name {word[:80]!r}, which is none for a file")
    return folder() / run / f"{name}.safetensors"


def of_shards(run: str, name: str, hub: str) -> Path:
    """Where the files of `KeptShards` begin. Another run by this name has a hub with another key."""
    from transport.protocol import short_key

    return path_of(run, name).with_name(f"{name}@{short_key(hub)}")


def find(run: str, name: str, recipe_hash: str, base_digest: str, told: Told) -> Kept | None:
    """What this peer kept of this run, read once whole; None where there is nothing that it can use."""
    from recipes.training import read

    path = path_of(run, name)
    if not path.is_file():
        return None
    try:
        stay = read(path)
    except (OSError, ValueError) as problem:
        told(f"what this peer kept of {run} is damaged and removed ({problem}): it begins without a residual")
        path.unlink(missing_ok=True)
        return None
    wanted = about(run, name, recipe_hash, base_digest)
    if other := [what for what in wanted if stay.about.get(what) != wanted[what]]:
        told(f"what {path} keeps is of another {' and '.join(other)}: it is not used, and left alone")
        return None
    return Kept(path, stay.round, stay.fingerprint)


def about(run: str, name: str, recipe_hash: str, base_digest: str) -> dict[str, str]:
    return {"run": run, "peer": name, "recipe": recipe_hash, "base": base_digest}


def keep(
    peer: Peer,
    run: str,
    name: str,
    recipe_hash: str,
    base_digest: str,
    told: Told,
    most: int | None = None,
) -> int:
    """Write down a peer that has left, if it has something of its own. Returns the bytes on the disk.
    `most`: bytes that this may take.

    Where that cannot be, a warning says why: the peer then comes back without its residual.
    """
    from recipes.training import peer_checkpoint

    forget_old()
    if not peer_checkpoint.anything_of(peer):
        return 0
    path, size = path_of(run, name), peer_checkpoint.size_of(peer)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = shutil.disk_usage(path.parent).free
        if size + SPARE > room:
            raise ValueError(f"it takes {size / 1e9:.1f} GB, {room / 1e9:.1f} GB are free on {path.parent}")
        if most is not None and size > most:
            raise ValueError(f"it takes {size / 1e9:.1f} GB, --max-disk allows {most / 1e9:.1f} GB")
        peer_checkpoint.keep(peer, path, about(run, name, recipe_hash, base_digest))
    except (OSError, ValueError) as problem:
        told(f"this peer's residual is not kept: {problem}")
        return 0
    return path.stat().st_size


def forget(run: str) -> None:
    """The run is over: nobody on this machine needs what is kept of it."""
    shutil.rmtree(path_of(run, "any").parent, ignore_errors=True)


def forget_old() -> None:
    """What was kept long ago."""
    for path in folder().glob("*/*"):
        with suppress(FileNotFoundError):  # another peer of this machine did it
            if path.stat().st_mtime < time.time() - OLD_S:
                path.unlink()
