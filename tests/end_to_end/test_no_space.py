"""The hub's disk is full, at whichever write: the run stops and says why, and nothing is lost."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest
from crash_points import watched
from test_every_write import SAMPLES, audit, run

from transport.protocol import RunEnded

pytestmark = pytest.mark.slow

SQL = ("BEGIN", "INSERT OR REPLACE IN", "DELETE FROM leased", "PRAGMA user_version", "COMMIT")
FILES = (
    "writing updates.log",
    "writing packets.log",
    "writing journal.log",
    "fsync",
    "writing error.safetensors.part",
    "before replace",
    "before truncate",
)


@pytest.mark.parametrize("kind", SQL + FILES)
def test_full_at_any_kind_of_write_the_run_says_so_and_goes_on_once_there_is_room(
    tmp_path: Path, kind: str
) -> None:
    packets = 0

    def full(where: str) -> None:
        """A disk on which, from the second round on, there is room for anything but this."""
        nonlocal packets
        packets += where == "wrote packets.log"
        if packets > 2 and kind in where:
            raise error

    error: Exception = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind in SQL:
        error = sqlite3.OperationalError("database or disk is full")

    with watched(tmp_path / "run", full):
        stopped = run(tmp_path / "run", ("ann", "bob"))
    ended = stopped.events[-1]

    assert isinstance(ended, RunEnded)
    assert (ended.exit_code, ended.reason) == (8, "the hub's disk is full")
    assert {over.reason for over in stopped.over if over} == {"the hub's disk is full"}
    again = run(tmp_path / "run", ("ann", "bob"))
    assert again.packets[: len(stopped.packets)] == stopped.packets, "what was announced is there"
    assert again.named() == list(range(SAMPLES))
    audit(tmp_path / "run")
