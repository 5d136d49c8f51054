"""Hides join tokens from other users of a machine, who can read the arguments of a running command.

A command that is given a run URL starts itself again with the URL in its environment, which only its own user
can read, and without the token in its arguments.
"""

from __future__ import annotations

import os
import signal
import sys

SCHEME = "cocktail://"  # of a run URL
TYPED = "COCKTAIL_TYPED_URL"  # the URL that was an argument


def hide_token() -> None:
    """Start this process anew without the token; in the new process put the URL back into sys.argv.

    Call it first. It does nothing on Windows, which does not show arguments to other users, or where sys.argv
    is not what was typed.
    """
    if url := os.environ.pop(TYPED, ""):
        sys.argv[:] = [url if argument == masked(url) else argument for argument in sys.argv]
        delay_interrupts(False)
        return
    given, typed = sys.argv[1:], sys.orig_argv
    urls = {argument for argument in given if SCHEME in argument}
    if os.name != "posix" or len(urls) != 1 or typed[-len(given) :] != given or not sys.executable:
        return
    (url,) = urls
    delay_interrupts(True)  # until the new process has come this far: Python's start prints a traceback
    shown = [masked(argument) if argument == url else argument for argument in typed]
    os.execve(sys.executable, shown, {**os.environ, TYPED: url})


def delay_interrupts(wanted: bool) -> None:
    """Have Ctrl-C wait, also in a process that takes this one's place; or let it through again."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK if wanted else signal.SIG_UNBLOCK, {signal.SIGINT})


def masked(url: str) -> str:
    return f"{SCHEME}***@{url.rpartition('@')[2]}" if "@" in url else f"{SCHEME}***"
