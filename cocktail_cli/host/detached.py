"""A launch's command line, run again in the background: `--detach`.

The background process tells its events through a pipe until the run has started or failed to. Then nothing
reads them any more; all it says is in the run's folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cocktail_cli.errors import Failure
from cocktail_cli.ui import Event, RunStarted, View

from .command_process import read_events, start_command
from .run_folder import LOG

# On Windows an invisible console of its own, which the run's peers share and which closes with none.
NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)


def start_detached(arguments: list[str], folder: Path, view: View) -> None:
    """Launch with these arguments in another process; return once its run has started.

    Args:
        folder: of the run, claimed.

    Raises:
        Failure: as the launch itself would.
    """
    with (folder / LOG).open("a", encoding="utf-8") as log:  # beside events: tracebacks of a crash
        command = detached_command(arguments, folder)
        process = start_command(
            command, NO_WINDOW, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
    try:
        for event in read_events(process):
            if isinstance(event, RunStarted):
                view.close()  # later events are not shown here
                view.show(event)
                return
            view.show(event)
    except KeyboardInterrupt:  # nothing was begun
        process.terminate()
        raise
    hint = f"what it said: {folder / LOG}"
    raise Failure("unexpected", f"the run's process ended with exit {process.wait()}", hints=(hint,))


def detached_command(arguments: list[str], folder: Path) -> list[str]:
    """Return the other process's arguments: the same words and folder, with events as JSON."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first, *options = [one for one in arguments[:end] if one not in ("--fresh", "--detach")]
    named = ["-o", str(folder)] if "--fresh" in arguments[:end] else []  # the folder that was found for it
    return [first, "--json", "--detached", *options, *named, *arguments[end:]]


class DetachedView:
    """The view of the background process, whose output is read until the run has started."""

    def __init__(self, view: View) -> None:
        self.view = view

    def show(self, event: Event) -> None:
        self.view.show(event)
        if isinstance(event, RunStarted):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        self.view.close()
