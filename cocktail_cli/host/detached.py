"""`launch --detach`: the run goes on in a process of its own, which lives longer than the terminal.

That process is the same command once more. Through a pipe it tells its events to the one that has started it,
until the run has started or cannot; then nobody reads, and all it says is in the run's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cocktail_cli.errors import Failure
from cocktail_cli.ui import Event, RunStarted, View, from_json

from .host_session import settled
from .local_peers import OWN_GROUP
from .run_folder import LOG

# On Windows a console that nobody sees, its own: the run's peers share it, and it closes with none.
NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)


def start(arguments: list[str], folder: Path, view: View) -> None:
    """The launch of these arguments as another process; returns once its run has started.

    Args:
        folder: of the run, claimed.

    Raises:
        Failure: as the launch would have.
    """
    with (folder / LOG).open("a", encoding="utf-8") as log:  # what is said beside events: how it crashed
        process = subprocess.Popen(
            [sys.executable, "-m", "cocktail_cli", *command(arguments, folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            creationflags=OWN_GROUP | NO_WINDOW,
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            told = json.loads(line)
            if "error" in told:
                raise Failure.of_json(told["error"])
            event = from_json(told)
            if isinstance(event, RunStarted):
                view.close()  # what comes after is not seen here
                view.show(event)
                return
            view.show(event)
    except KeyboardInterrupt:  # nothing was begun
        process.terminate()
        raise
    hint = f"what it said: {folder / LOG}"
    raise Failure("unexpected", f"the run's process ended with exit {process.wait()}", hints=(hint,))


def command(arguments: list[str], folder: Path) -> list[str]:
    """What the other process is given: the same words, in their own folder, for a program to read."""
    first, *rest = settled(arguments, str(folder))
    end = rest.index("--") if "--" in rest else len(rest)
    same = [one for one in rest[:end] if one != "--detach"]
    return [first, "--json", "--detached", *same, *rest[end:]]


class Parting:
    """In that process: a view that is looked at until the run has started."""

    def __init__(self, view: View) -> None:
        self.view = view

    def show(self, event: Event) -> None:
        self.view.show(event)
        if isinstance(event, RunStarted):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        self.view.close()
