"""File systems of other machines, on which SQLite's write-ahead log does not work: it needs shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

# as Linux, macOS and the BSDs call them; Windows marks a drive of another machine as `remote`
REMOTE = frozenset(
    [
        "9p",
        "afpfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "drvfs",
        "fuse.ceph",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.lustre",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "prl_fs",
        "smb2",
        "smb3",
        "smbfs",
        "vboxsf",
        "webdav",
    ]
)


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
