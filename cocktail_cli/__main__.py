"""The command `cocktail`, and `python -m cocktail_cli`: what is done before other modules load, and after."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress


class QuickEnd:
    """Ends this process after all other functions of atexit: Python would take torch apart for seconds."""

    def __init__(self) -> None:
        self.status: int | None = None  # None: an unusual end, which is left to Python

    def __call__(self) -> None:
        if self.status is not None:
            with suppress(OSError, ValueError):  # the reader of the output is gone
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(self.status)


def main() -> None:
    """Run the command line. Ctrl-C while the modules load ends this process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup may have it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    end = QuickEnd()
    atexit.register(end)  # the first to be registered is called last
    from cocktail_cli.machine import hide_token

    hide_token()  # it may start this process anew
    from cocktail_cli.main import main as command

    try:
        command()
    except SystemExit as ended:
        end.status = ended.code if isinstance(ended.code, int) else None
        raise


if __name__ == "__main__":
    main()
