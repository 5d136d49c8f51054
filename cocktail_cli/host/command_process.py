"""A `cocktail` command in a process of its own: how it is started, and how its events are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from cocktail_cli.errors import Failure
from cocktail_cli.ui import Event, from_json


def start_command(arguments: list[str], flags: int = 0, **options: Any) -> subprocess.Popen[str]:
    """Start a `cocktail` command out of this terminal's process group, so that Ctrl-C does not reach it.

    Args:
        flags: creation flags for Windows.
        options: of Popen.
    """
    # Windows' flag for a process group of its own; elsewhere start_new_session makes one.
    flags |= getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    # Where this process does not import from the working folder, no random.py there may shadow a module.
    safe = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *safe, "-m", "cocktail_cli", *arguments]
    return subprocess.Popen(command, text=True, start_new_session=True, creationflags=flags, **options)


def read_events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """Yield the events that a command with --json prints, until its output ends.

    Raises:
        Failure: the command's own.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith('{"v": '):
            continue  # a library, or code of the model, has printed something
        told = json.loads(line)
        if "error" in told:
            raise Failure.of_json(told["error"])
        yield from_json(told)
