"""`cocktail launch`: prepare a run, start its hub and local peers, show it, hand over the model; `cocktail
resume`: go on with a run that was paused, was killed, or failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cocktail_cli import options
from cocktail_cli.assembly import NONE_GIVEN, Given, for_peers, places_of
from cocktail_cli.errors import Failure
from cocktail_cli.host import LaunchSettings, LocalSettings, hosted_before, launch_run
from cocktail_cli.machine import BIND, PORT, ListenAddress, isolate_model_code, load_run
from cocktail_cli.options import unfinished_runs
from cocktail_cli.ui import Display, open_view


def launch(
    recipe: options.RecipeOrModel = None,
    overrides: options.Overrides = None,
    data: options.DataPath = None,
    model: options.ModelName = None,
    output_dir: options.Output = None,
    peers: Annotated[int, options.value("--peers", "N", "Peers to start on this machine.", min=0)] = 1,
    no_train: Annotated[bool, options.flag("--no-train", "Only coordinate: start no peer here.")] = False,
    wait_for_guests: Annotated[
        int, options.value("--wait-for-guests", "N", "Start once N peers from elsewhere are here.", min=0)
    ] = 0,
    fresh: Annotated[
        bool, options.flag("--fresh", "Leave the run in DIR alone, begin anew in DIR-2.")
    ] = False,
    detach: options.Detach = False,
    bind: options.Bind = BIND,
    port: options.Port = None,
    advertise: options.Advertise = None,
    device: options.Device = "auto",
    micro_batch_size: options.MicroBatch = None,
    max_up: options.MaxUp = None,
    max_down: options.MaxDown = None,
    vram_limit: options.VramLimit = None,
    trust_remote_code: options.TrustCode = False,
    share_gated_base: Annotated[
        bool, options.flag("--share-gated-base", "Serve a gated base, if you may.")
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
    """Start a run. Prints the line that others join with, and ends with the model on disk.

    Examples: cocktail launch smoke --peers 3
    cocktail launch --model ./my-model --data rows.jsonl
    cocktail launch my.yaml learning_rate=1e-4 --data rows.jsonl -o outputs/first

    After a crash or a pause `cocktail resume` continues the run. After --detach `cocktail logs` has its
    words. With --json each line is an event: {"v":1,"t":...,"event":"step","step":3,"loss":4.1,...}
    """
    if no_train and peers > 1:
        raise Failure(
            "usage", f"--no-train starts no peer here, and --peers {peers} some", hints=("give one of them",)
        )
    isolate_model_code(trust_remote_code)
    local = LocalSettings(
        device, micro_batch_size, max_up, max_down, vram_limit, trust_remote_code, for_peers(given)
    )
    at = PORT if port is None else port
    wanted = LaunchSettings(
        recipe=recipe,
        overrides=overrides or [],
        data=data,
        model=model,
        output_dir=output_dir,
        listen=ListenAddress(bind, at, advertise, port is not None, places_of(given)),
        local=local,
        peers=0 if no_train else peers,
        guests=wait_for_guests,
        fresh=fresh,
        detach=detach,
        detached=detached,
        share_gated_base=share_gated_base,
        life_line=life_line,
        verbose=verbose,
        given=given,
    )
    host(wanted, Display(as_json, quiet, verbose, not no_color, progress, life_line))


def host(wanted: LaunchSettings, how: Display) -> None:
    """Host a run to its end or pause."""
    with open_view(how) as view:
        status = launch_run(wanted, view)
    if status:
        raise typer.Exit(status)


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
    host(wanted, Display(as_json, quiet, verbose, not no_color, progress, life_line))
