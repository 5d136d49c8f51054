"""`cocktail resume`: go on with a run that was paused, was killed, or failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocktail_cli import options
from cocktail_cli.assembly import NONE_GIVEN, Given, places_of
from cocktail_cli.completion import unfinished_runs
from cocktail_cli.host import LaunchSettings, hosted_before, launch_run
from cocktail_cli.machine import ListenAddress, isolate_model_code, load_run
from cocktail_cli.ui import Display, open_view


def resume(
    run: Annotated[str, options.argument("RUN", "A run's name, or its output folder.", unfinished_runs)],
    peers: Annotated[
        int | None, options.value("--peers", "N", "Peers to start here; 0: none.", min=0)
    ] = None,
    detach: options.Detach = False,
    bind: Annotated[str | None, options.BIND] = None,
    port: Annotated[
        int | None, options.port("TCP port. Another one makes a new URL.", rich_help_panel=options.NETWORK)
    ] = None,
    advertise: Annotated[
        str | None, options.value("--advertise", "HOST[:PORT]", "Address in a new run URL.", options.NETWORK)
    ] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    micro_batch_size: options.MicroBatch = None,
    max_up: options.MaxUp = None,
    max_down: options.MaxDown = None,
    vram_limit: options.VramLimit = None,
    trust_remote_code: options.TrustCode = False,
    drop_error_feedback: Annotated[
        bool,
        options.flag(
            "--drop-error-feedback",
            "Go on where the aggregator's error feedback is lost: what it has not sent yet is lost too.",
        ),
    ] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_color: options.NoColor = False,
    progress: options.ProgressOption = "auto",
    detached: options.Detached = False,
    life_line: options.LifeLine = False,
    given: Given = NONE_GIVEN,
) -> None:
    """Continue a run that was paused, killed, or failed.

    Its recipe, data, address and URL are those of before, so volunteers return by themselves. So are the
    options of its launch, unless they are given here.

    Examples: cocktail resume amber-otter-42
    cocktail resume outputs/first --peers 2 --device cuda:1
    """
    record = load_run(run)
    local, count = hosted_before(
        record,
        given,
        peers=peers,
        device=device,
        micro_batch_size=micro_batch_size,
        max_up=max_up,
        max_down=max_down,
        vram_limit=vram_limit,
        trust_remote_code=trust_remote_code or None,
    )
    isolate_model_code(local.trust_remote_code)
    wanted = LaunchSettings(
        recipe=record.recipe,
        overrides=[],
        data=None,
        model=None,
        output_dir=Path(record.output_dir),
        listen=ListenAddress(
            bind or record.bind, record.port if port is None else port, advertise, places=places_of(given)
        ),
        local=local,
        peers=count,
        run=record,
        detach=detach,
        detached=detached,
        life_line=life_line,
        drop_error_feedback=drop_error_feedback,
        verbose=verbose,
        given=given,
    )
    with open_view(Display(as_json, quiet, verbose, not no_color, progress, life_line)) as view:
        status = launch_run(wanted, view)
    if status:
        raise typer.Exit(status)
