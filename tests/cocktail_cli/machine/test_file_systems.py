"""The file system of a folder is that of the innermost mount above it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cocktail_cli.machine import network_file_system

MOUNTS = [
    SimpleNamespace(mountpoint=point, fstype=kind, opts=options)
    for point, kind, options in (
        ("/", "ext4", "rw"),
        ("/home", "nfs4", "rw,vers=4.2"),
        ("/home/dana/scratch", "xfs", "rw"),
        ("/mnt/share", "CIFS", "rw"),
        ("/media/z", "NTFS", "rw,remote"),
    )
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/runs", None),
        ("/home/dana/outputs/not/yet/there", "nfs4"),
        ("/home/dana/scratch/outputs", None),
        ("/homework", None),
        ("/mnt/share", "cifs"),
        ("/media/z/runs", "ntfs"),
    ],
)
def test_a_folder_of_another_machine_is_told_from_one_of_this(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


def test_the_mounts_of_this_machine_are_read(tmp_path: Path) -> None:
    assert network_file_system(tmp_path) is None
