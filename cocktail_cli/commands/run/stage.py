"""`cocktail stage`: be one of the machines that take part in a run together, each with some layers."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from cocktail_cli import machine, options
from cocktail_cli.errors import EXIT
from cocktail_cli.host import log_to
from cocktail_cli.signals import leave_on_signal
from cocktail_cli.ui import Display, Progressed, Warning, open_view


def stage(
    ring_url: Annotated[
        str,
        typer.Argument(metavar="RING_URL", help="The ring URL that `cocktail join --ring` prints for it."),
    ],
    device: options.Device = "auto",
    vram_limit: options.VramLimit = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_color: options.NoColor = False,
    progress: options.ProgressOption = "auto",
) -> None:
    """Serve as one pipeline stage of a multi-machine peer, until Ctrl-C.

    Each of them has some layers of a model that none has room for. The first one joins the run, and tells
    this one all that it needs: it fetches nothing itself. Start it again after an interruption, the peer then
    joins anew.

    Example: cocktail stage cocktail-ring://...@192.168.0.10:29500,-/1
    """
    from transport.stages import parse_ring

    log_to(None, verbose)
    url = parse_ring(ring_url)
    with open_view(Display(as_json, quiet, verbose, not no_color, progress)) as view:
        view.show(Progressed("loading the libraries"))
        from cocktail_cli.stage_machines import RingLines
        from recipes.staged_peer import StageMachine, StageServer

        [chosen] = machine.pick_devices(device, 1)
        machine.limit_memory([chosen], vram_limit)
        lines = RingLines.at(url)
        lines.lost = lambda why: view.show(Warning(why))
        with closing(lines):
            server = StageServer(StageMachine(url.number, chosen), lines, url.stages)
            with leave_on_signal(lambda why: server.stop.set()) as request:
                view.show(Progressed(f"stage {url.number} of {url.stages}, on {chosen}: ready for its head"))
                server.run()
            view.show(Progressed(f"left ({request.reason})"))
    if request.reason == "SIGTERM":
        raise typer.Exit(EXIT["lost"])
