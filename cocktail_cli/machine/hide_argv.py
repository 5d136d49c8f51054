"""What other users of a machine see of a command: its arguments, for as long as it runs. A run's URL has the
token, so a command that is given one starts itself again, with the URL in its environment, which is its own
user's alone, and without the token in its arguments.
"""

from __future__ import annotations

import os
import sys

SCHEME = "cocktail://"
TYPED = "COCKTAIL_TYPED_URL"  # the URL that was an argument


def hide() -> None:
    """To be called first. Does not return where it starts this process anew; then it puts the URL back into
    sys.argv, which nobody else sees.

    Nothing is done where no process can become another (Windows, which does not show arguments to other
    users), and where sys.argv is not what was typed.
    """
    if url := os.environ.pop(TYPED, ""):
        sys.argv[:] = [url if argument == masked(url) else argument for argument in sys.argv]
        return
    given, typed = sys.argv[1:], sys.orig_argv
    urls = {argument for argument in given if argument.startswith(SCHEME)}
    if os.name != "posix" or len(urls) != 1 or typed[-len(given) :] != given or not sys.executable:
        return
    (url,) = urls
    shown = [masked(argument) if argument == url else argument for argument in typed]
    os.execve(sys.executable, shown, {**os.environ, TYPED: url})


def masked(url: str) -> str:
    return f"{SCHEME}***@{url.rpartition('@')[2]}" if "@" in url else f"{SCHEME}***"
