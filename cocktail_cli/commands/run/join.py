"""`cocktail join`: lend this machine to a run, until it is over or Ctrl-C."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime
from typing import Annotated

import typer

from cocktail_cli import machine, options, volunteer
from cocktail_cli.errors import Failure
from cocktail_cli.host import log_to
from cocktail_cli.ui import Display, Warning, open_view

RETURN_WITHIN = 600.0  # seconds to reach the hub after a pause: nobody may be there to try again


def join(
    run_url: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_URL",
            envvar="COCKTAIL_RUN_URL",
            help="The host's line; @FILE reads it from a file, - from stdin.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", envvar="COCKTAIL_NAME", help="Name to show (default: this machine's)."
        ),
    ] = None,
    wait: Annotated[
        str,
        typer.Option("--wait", metavar="TIME", help="Keep trying while the run is unreachable: 10m."),
    ] = "0s",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", envvar="COCKTAIL_YES", help="Do not ask before joining.")
    ] = False,
    device: options.Device = "auto",
    gpus: options.Gpus = 1,
    micro_batch_size: options.MicroBatch = None,
    max_up: options.MaxUp = None,
    max_down: options.MaxDown = None,
    vram_limit: options.VramLimit = None,
    max_disk: options.MaxDisk = None,
    cache_dir: options.CacheDir = None,  # its callback sets it
    hours: options.LendHours = None,
    until: options.Until = None,
    only_idle: options.OnlyIdle = False,
    max_temp: options.MaxTemp = None,
    listen: options.Listen = None,
    advertise: options.PeerAdvertise = None,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_color: options.NoColor = False,
    progress: options.ProgressOption = "auto",
    life_line: options.LifeLine = False,
) -> None:
    """Lend this machine to a run. It trains until the run is over or you press Ctrl-C.

    The host cannot run code here: a recipe is data, weights are tensors. Outside --hours, or while
    --only-idle or --max-temp forbid it, this machine leaves, stores a checkpoint, and returns by itself.

    Examples: cocktail join cocktail://...
    echo "$URL" | cocktail join - -y
    cocktail join @url.txt --hours 22:00-07:00 --max-up 5mbit --vram-limit 20GiB

    With --json each line is an event: {"v":1,"t":...,"event":"step","step":3,"loss":4.1,...}
    """
    from recipes.config import parse_duration
    from transport import parse_url

    url = parse_url(volunteer.read_url(run_url))
    try:
        patience = float(parse_duration(wait))
    except ValueError as error:
        raise Failure("usage", f"--wait: {error}") from error
    if not yes and not sys.stdin.isatty():
        raise Failure("usage", "there is no terminal to ask on", hints=("-y joins without being asked",))
    log_to(None, verbose)
    machine.isolate_model_code(trust_remote_code)
    limits = volunteer.VolunteerLimits(
        name=name or machine.default_peer_name(),
        devices=machine.pick_devices(device, gpus),
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
        machine.limit_memory(limits.devices, vram_limit)
    leave_at = volunteer.next_at(until, datetime.now()) if until else None
    rules = volunteer.Availability(hours, leave_at, only_idle, max_temp)
    with open_view(Display(as_json, quiet, verbose, not no_color, progress, life_line)) as view:
        monitor = volunteer.AvailabilityMonitor(rules, limits.devices, lambda what: view.show(Warning(what)))

        def session(again: bool) -> volunteer.VolunteerSession:
            asked = replace(limits, ask=limits.ask and not again)
            one = volunteer.VolunteerSession(url, asked, view, monitor)
            one.take_part(max(patience, RETURN_WITHIN) if again else patience, life_line)
            return one

        status = volunteer.take_turns(monitor, session, limits.ask, view.show)
    if status:
        raise typer.Exit(status)
