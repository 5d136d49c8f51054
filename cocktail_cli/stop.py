"""`cocktail stop`: the owner ends a run; what is committed becomes the model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cocktail_cli.options import Json, Quiet, RunArgument
from cocktail_cli.runs import load
from cocktail_cli.status import unreachable

TIMEOUT = 10.0  # seconds for an answer


def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the exchange in flight.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """End a run of this machine: its peers are told, its model is written.

    Example: cocktail stop amber-otter-42
    """
    from transport import ask_stop, parse_url
    from transport.errors import Unreachable

    record = load(run)
    if record.state == "running":
        try:
            hub = parse_url(record.local_url())
            ask_stop(hub.host, hub.port, hub.key, record.run, record.keys["stop"], now, TIMEOUT)
        except Unreachable as error:
            raise unreachable(record, error) from error
    if as_json:
        typer.echo(
            json.dumps({"v": 1, "run": record.run, "was": record.state, "output_dir": record.output_dir})
        )
    elif quiet:
        typer.echo(record.run)
    elif record.state == "running":
        typer.echo(f"{record.run} is ending; its model will be in {record.output_dir}")
    else:
        typer.echo(f"{record.run} was over already ({record.state}); see {record.output_dir}")
