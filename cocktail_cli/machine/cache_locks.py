"""Cache folders that one process at a time works in, and in which the next one continues."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cocktail_cli.errors import Failure

MOST = 64  # processes of one machine that want the same folder


@contextmanager
def locked_folder(wanted: Path) -> Iterator[Path]:
    """Lock the first of `wanted`, `wanted`-2, ... that no live process works in, and make it if it is
    missing.

    What an earlier process left in it stays, unless the caller removes it. Raises Failure (preflight) where
    no lock is free.
    """
    from transport.ledger import lock_exclusively
    from transport.protocol import LedgerBusy

    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST + 1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            lock = lock_exclusively(lock_of(folder))
        except LedgerBusy:
            continue
        folder.mkdir(exist_ok=True)
        try:
            yield folder
        finally:
            if not folder.exists():
                with suppress(OSError):  # another process has it open
                    lock_of(folder).unlink()  # under the lock: nobody can have one that others do not see
            lock.close()
        return
    said = f"{MOST} processes hold {wanted}, or no lock can be had there"
    raise Failure("preflight", said, hints=("COCKTAIL_HOME=DIR on a local disk",))


def lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def remove_unlocked(folder: Path, keep: str) -> None:
    """Remove the folders in `folder` that no live process works in, except those named `keep`..."""
    from transport.ledger import lock_exclusively
    from transport.protocol import LedgerBusy

    for old in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not old.is_dir() or old.name.startswith(keep):
            continue
        # where it is in use, or not ours to remove, it stays
        with suppress(LedgerBusy, OSError), closing(lock_exclusively(lock_of(old))):
            shutil.rmtree(old)
            lock_of(old).unlink()
