"""The command `cocktail`, and `python -m cocktail_cli`: what has to be done before other modules load."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line. Ctrl-C while the modules load ends this process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup may have it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cocktail_cli.machine import hide_token

    hide_token()  # it may start this process anew
    from cocktail_cli.main import main as command

    command()


if __name__ == "__main__":
    main()
