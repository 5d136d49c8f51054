"""`cocktail join`: lend this machine to a run, until it is over or Ctrl-C."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from typing import Annotated

import typer

from cocktail_cli.errors import Failure
from cocktail_cli.host import log_to
from cocktail_cli.machine import default_peer_name, isolate_model_code, limit_memory, pick_devices
from cocktail_cli.options import (
    CacheDir,
    Device,
    Gpus,
    Json,
    LendHours,
    Listen,
    MaxDisk,
    MaxDown,
    MaxTemp,
    MaxUp,
    MicroBatch,
    NoColor,
    OnlyIdle,
    PeerAdvertise,
    ProgressOption,
    Quiet,
    TrustCode,
    Until,
    Verbose,
    VramLimit,
)
from cocktail_cli.ui import Display, Warning, open_view
from cocktail_cli.volunteer import (
    Availability,
    AvailabilityMonitor,
    VolunteerLimits,
    VolunteerSession,
    next_at,
    read_url,
    take_turns,
)

RETURN_WITHIN = 600.0  # seconds to reach the hub after a pause: nobody may be there to try again


def join(
    run_url: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_URL",
            envvar="COCKTAIL_RUN_URL",
            help="The line that the run's host passed on; @FILE reads it from a file, - from stdin.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", envvar="COCKTAIL_NAME", help="Name that the other peers see (default: this machine's)."
        ),
    ] = None,
    device: Device = "auto",
    gpus: Gpus = 1,
    micro_batch_size: MicroBatch = None,
    max_up: MaxUp = None,
    max_down: MaxDown = None,
    vram_limit: VramLimit = None,
    max_disk: MaxDisk = None,
    cache_dir: CacheDir = None,  # its callback sets it
    hours: LendHours = None,
    until: Until = None,
    only_idle: OnlyIdle = False,
    max_temp: MaxTemp = None,
    listen: Listen = None,
    advertise: PeerAdvertise = None,
    trust_remote_code: TrustCode = False,
    wait: Annotated[
        str,
        typer.Option(
            "--wait", metavar="TIME", help="Keep trying this long while the run cannot be reached: 10m."
        ),
    ] = "0s",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", envvar="COCKTAIL_YES", help="Do not ask before joining.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    no_color: NoColor = False,
    progress: ProgressOption = "auto",
    life_line: Annotated[bool, typer.Option("--life-line", hidden=True)] = False,
) -> None:
    """Join a run: fetch its model, train and exchange updates until the run is over or you press Ctrl-C.

    The host cannot run code here: a recipe is data, weights are tensors. Outside --hours, or while
    --only-idle or --max-temp forbid it, this machine leaves, stores a checkpoint, and joins again by itself.

    Examples: cocktail join cocktail://...
    echo "$URL" | cocktail join - -y
    cocktail join @url.txt --hours 22:00-07:00 --max-up 5mbit --vram-limit 20GiB

    With --json every line of stdout is an event: {"v":1,"t":...,"event":"step","step":3,"loss":4.1,...}
    """
    from recipes.config import parse_duration
    from transport import parse_url

    url = parse_url(read_url(run_url))
    try:
        patience = float(parse_duration(wait))
    except ValueError as error:
        raise Failure("usage", f"--wait: {error}") from error
    if not yes and not sys.stdin.isatty():
        raise Failure("usage", "there is no terminal to ask on", hints=("-y joins without being asked",))
    log_to(None, verbose)
    isolate_model_code(trust_remote_code)
    limits = VolunteerLimits(
        name=name or default_peer_name(),
        devices=pick_devices(device, gpus),
        micro_batch_size=micro_batch_size,
        ask=not yes,
        max_up=max_up,
        max_down=max_down,
        listen=listen,
        advertise=advertise,
        vram_limit=vram_limit,
        max_disk=max_disk,
        trust_remote_code=trust_remote_code,
    )
    if gpus == 1:
        limit_memory(limits.devices, vram_limit)
    rules = Availability(hours, next_at(until, datetime.now()) if until else None, only_idle, max_temp)
    with open_view(Display(as_json, quiet, verbose, not no_color, progress)) as view:
        monitor = AvailabilityMonitor(rules, limits.devices, lambda what: view.show(Warning(what)))

        def session(again: bool) -> VolunteerSession:
            one = VolunteerSession(url, replace(limits, ask=limits.ask and not again), view, monitor)
            one.take_part(max(patience, RETURN_WITHIN) if again else patience, life_line)
            return one

        status = take_turns(monitor, session, limits.ask, view.show)
    if status:
        raise typer.Exit(status)
