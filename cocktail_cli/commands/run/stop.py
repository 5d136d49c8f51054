"""`cocktail stop`: end a run, whose committed rounds become the model; or pause it."""

from __future__ import annotations

from typing import Annotated

import typer

from cocktail_cli.machine import load_run
from cocktail_cli.options import Json, Quiet, RunArgument, flag
from cocktail_cli.ui import say, say_json

from .status import unreachable

TIMEOUT = 10.0  # seconds for an answer


def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the exchange in flight.")] = False,
    pause: Annotated[bool, flag("--pause", "Write no model: `resume` continues the run.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """End a run of this machine and write its model; or pause it.

    A paused run's peers store checkpoints, its launch ends, and `cocktail resume` continues it.

    Examples: cocktail stop amber-otter-42
    cocktail stop amber-otter-42 --pause

    With --json one object: run, was (its state), output_dir.
    """
    from transport import ask_status, ask_stop, parse_url
    from transport.protocol import Unreachable

    record, rounds = load_run(run), 0
    if record.state == "running":
        try:
            rounds = ask_status(parse_url(record.local_url()), TIMEOUT)["round"]
            ask_stop(parse_url(record.local_url()), record.keys["stop"], now, pause, TIMEOUT)
        except Unreachable as error:
            raise unreachable(record, error) from error
    if as_json:
        say_json({"run": record.run, "was": record.state, "output_dir": record.output_dir})
    elif quiet:
        say(record.run)
    elif record.state == "running" and pause:
        say(f"{record.run} is pausing. To continue it:", f"cocktail resume {record.run}")
    elif record.state == "running" and not rounds:
        say(f"{record.run} is ending before its first step, so there is no model")
    elif record.state == "running":
        say(f"{record.run} is ending; its model will be in {record.output_dir}")
    elif record.state == "paused":
        say(f"{record.run} is paused. To continue it:", f"cocktail resume {record.run}")
        say(f"Or make a model of it: cocktail export {record.run} -o DIR", err=True)
    else:
        say(f"{record.run} was over already ({record.state}); see {record.output_dir}")
