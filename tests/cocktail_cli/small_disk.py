"""A disk of a few MB that can be filled and emptied from outside: a tmpfs in a mount namespace of one's own.

with small_disk(folder, megabytes=16) as disk:
    forked.start(folder, "launch", "smoke", "-o", str(disk.path / "out"), before=disk.enter)
    disk.fill()
"""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SmallDisk:
    """A file system that only processes started with `inside` see under its `path`."""

    path: Path
    holder: int  # process that keeps the namespace

    @property
    def inside(self) -> list[str]:
        """Return the prefix of a command that runs it where the disk is mounted."""
        return [
            "nsenter",
            "-t",
            str(self.holder),
            "-U",
            "-m",
            "--preserve-credentials",
            "--wd=" + os.getcwd(),
        ]

    @property
    def enter(self) -> str:
        """Python by which a process that has one thread goes there."""
        places = [f"/proc/{self.holder}/ns/{kind}" for kind in ("user", "mnt")]
        return (
            "import ctypes, os\n"
            "here, libc = os.getcwd(), ctypes.CDLL(None, use_errno=True)\n"
            f"for number in [os.open(place, os.O_RDONLY) for place in {places}]:\n"
            "    if libc.setns(number, 0):\n"
            "        raise OSError(ctypes.get_errno(), 'setns')\n"
            "os.chdir(here)\n"
        )

    @property
    def outside(self) -> Path:
        """The same folder for this process."""
        return Path(f"/proc/{self.holder}/root{self.path}")

    def fill(self, leave: int = 0) -> None:
        """Leave so many bytes free, though others write meanwhile."""
        with (self.outside / "filler").open("ab") as file:
            while (free := os.statvfs(self.outside).f_bavail * 4096 - leave) > 0:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise  # that one says only that somebody has written since: less is free now

    def empty(self) -> None:
        """Make room again."""
        (self.outside / "filler").unlink()


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Skips the test, with the reason, where the system has no such thing."""
    if not (shutil.which("unshare") and shutil.which("nsenter")):
        pytest.skip("no small disk: unshare and nsenter (Linux) are not here")
    path.mkdir(parents=True, exist_ok=True)
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs '{path}' && echo ready && exec cat"
    with subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", mount],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            holder.stdin.close()
            pytest.skip(f"no small disk: {holder.stderr.read().strip()}")
        yield SmallDisk(path, holder.pid)
        holder.stdin.close()
