"""Processor time of a command, where the system tells it: other load stretches the clock."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache

# The least that a command of Typer's does.
SMALL = """import sys, typer
sys.argv, app = ["small", "--help"], typer.Typer()
app.command()(lambda: None)
app()"""


def timed(*arguments: str, env: Mapping[str, str] | None = None) -> tuple[float, str]:
    """Seconds and standard output of a python with these arguments: the best of three."""
    best, said = float("inf"), ""
    for _ in range(3):
        started, before = time.perf_counter(), os.times()
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=600,
        )
        seconds, after = time.perf_counter() - started, os.times()
        assert done.returncode == 0, done.stderr
        used = after.children_user + after.children_system - before.children_user - before.children_system
        best, said = min(best, used or seconds), done.stdout  # Windows says 0
    return best, said


@cache
def half_a_second() -> float:
    """On a machine as fast as most: on a slow one, as many times longer as a small command takes there."""
    return max(0.5, 4 * timed("-c", SMALL)[0])
