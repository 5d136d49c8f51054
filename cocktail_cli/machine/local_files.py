"""Files and folders of this machine: caches that one process at a time works in, its key pair, remote disks.

    COCKTAIL_HOME/peer.json     a CURVE key pair, made at first use, readable by its user alone

The handshake proves to a hub that the peer has the secret key. All processes of one user on a machine have
the same identity. A machine whose file was deleted is a new peer to every run.

On file systems of other machines SQLite's write-ahead log does not work: it needs shared memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cocktail_cli.errors import Failure

from .run_registry import home, write_private

if TYPE_CHECKING:
    from transport.protocol import CurveKeys

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


FILE = "peer.json"


def own_keys() -> CurveKeys:
    """Load this machine's key pair, made if missing. Raises Failure (preflight) where its file is damaged."""
    from transport.protocol import CurveKeys

    path = home() / FILE
    if not path.exists():
        make(path, CurveKeys.generate())
    try:
        keys = CurveKeys(**json.loads(path.read_text(encoding="utf-8")))
        keys.check()
    except (ValueError, TypeError) as error:
        hint = f"remove {path}: this machine is then a new peer to every run"
        raise Failure("preflight", f"the key pair in {path} is damaged: {error}", hints=(hint,)) from None
    return keys


@contextmanager
def registered_as(run: str, name: str) -> Iterator[bool]:
    """Register this process in a run under a name; yield False where another live process has that name too.

    A hub cannot tell a killed peer that comes back from a second process beside one whose connection is lost
    at the moment: their keys are the same.
    """
    place = home() / "here" / hashlib.sha256(f"{run}/{name}".encode()).hexdigest()[:32]
    with locked_folder(place) as mine:
        try:
            yield mine == place
        finally:
            mine.rmdir()


def make(path: Path, keys: CurveKeys) -> None:
    """Write a new pair atomically; if another process or thread was quicker, its pair stays."""
    mine = path.with_name(f"{FILE}.{os.urandom(4).hex()}.new")
    write_private(mine, json.dumps({"public": keys.public, "secret": keys.secret}))
    try:
        os.link(mine, path)
    except OSError:
        if not path.exists():  # a file system without links
            os.replace(mine, path)
    finally:
        mine.unlink(missing_ok=True)


# as Linux, macOS and the BSDs call them; Windows marks a drive of another machine as `remote`
REMOTE = {
    *("9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "drvfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"),
    *("nfs4", "prl_fs", "smb2", "smb3", "smbfs", "vboxsf", "webdav"),
    *(f"fuse.{kind}" for kind in ("ceph", "gcsfuse", "glusterfs", "lustre", "rclone", "s3fs", "sshfs")),
}


def network_file_system(path: Path, mounts: Iterable[Any] | None = None) -> str | None:
    """Return the type of the file system that `path` is, or would be, on, if it is another machine's.

    Args:
        mounts: as `psutil.disk_partitions` lists them; None: those of this machine.
    """
    place = path.expanduser().absolute()
    if place.drive.startswith("\\\\"):
        return "smb"
    known = psutil.disk_partitions(all=True) if mounts is None else mounts
    above = [mount for mount in known if place.is_relative_to(mount.mountpoint)]
    if not above:
        return None
    nearest = max(above, key=lambda mount: len(Path(mount.mountpoint).parts))
    kind = str(nearest.fstype).lower()
    return kind if kind in REMOTE or "remote" in str(nearest.opts).split(",") else None
