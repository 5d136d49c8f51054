"""`cocktail join`: lend this machine to a run, until it is over or Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import typer

from cocktail_cli import machine, options, volunteer
from cocktail_cli.assembly import (
    NONE_GIVEN,
    Given,
    Joining,
    TakingPart,
    devices_each,
    joining_of,
    pick_devices,
    url_to_dial,
)
from cocktail_cli.errors import EXIT, Failure
from cocktail_cli.host import LifeLine, log_to
from cocktail_cli.signals import StopAsked, leave_on_signal
from cocktail_cli.ui import Display, Progressed, Warning, open_view

RETURN_WITHIN = 600.0  # seconds to reach the hub after a pause: nobody may be there to try again


def join(
    run_url: Annotated[
        str | None,
        options.argument(
            "RUN_URL",
            "The host's line; @FILE reads it from a file, - from stdin.",
            envvar="COCKTAIL_RUN_URL",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    name: Annotated[
        str | None, options.value("--name", "NAME", "Name to show (default: this machine's).")
    ] = None,
    wait: Annotated[
        float, options.duration("--wait", "Keep trying while the run is unreachable: 10m.")
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before joining.")] = False,
    device: options.Device = "auto",
    micro_batch_size: options.MicroBatch = None,
    max_up: options.MaxUp = None,
    max_down: options.MaxDown = None,
    vram_limit: options.VramLimit = None,
    max_disk: options.MaxDisk = None,
    cache_dir: options.CacheDir = None,  # its callback sets it
    listen: options.Listen = None,
    advertise: options.PeerAdvertise = None,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_color: options.NoColor = False,
    progress: options.ProgressOption = "auto",
    life_line: options.LifeLine = False,
    given: Given = NONE_GIVEN,
) -> None:
    """Lend this machine to a run. It trains until the run is over or you press Ctrl-C.

    The host cannot run code here: a recipe is data, weights are tensors.

    Examples: cocktail join cocktail://...
    echo "$URL" | cocktail join - -y
    cocktail join @url.txt --max-up 5mbit --vram-limit 20GiB

    With --json each line is an event: {"v":1,"t":...,"event":"step","step":3,"loss":4.1,...}
    """
    if not yes and not sys.stdin.isatty():
        raise Failure("usage", "there is no terminal to ask on", hints=("-y joins without being asked",))
    log_to(None, verbose)
    display = Display(as_json, quiet, verbose, not no_color, progress, life_line)
    with open_view(display) as view, ExitStack() as stack:
        stop = stack.enter_context(leave_on_signal(lambda why: None))  # until a session has its own
        try:
            stack.enter_context(stop.raising())
            url = url_to_dial(volunteer.read_url(run_url))
            view.show(Progressed(f"dialling {url.address}"))
            line = LifeLine() if life_line else None
            joining = joining_of(given)
            limits = volunteer.VolunteerLimits(
                name=name or machine.default_peer_name(),
                devices=[],
                machines=min((one.machines for one in joining), default=1),
                micro_batch_size=micro_batch_size,
                max_up=max_up,
                max_down=max_down,
                listen=listen,
                advertise=advertise,
                vram_limit=vram_limit,
                max_disk=max_disk and max_disk - volunteer.free_bytes(0),  # beside what is there already
                trust_remote_code=trust_remote_code,
            )
            terms = [term for one in joining for term in one.terms()]
            question = None
            if line is None:  # else the launcher beside it has the hub
                # before torch is imported, which takes seconds: a person waits
                offer = volunteer.Offer(limits, machine.glance(device, devices_each(given)), terms)
                question = stack.enter_context(volunteer.JoinQuestion(url, offer))
                if not question.ask(wait, yes):
                    return
            view.show(Progressed("loading the libraries"))
            machine.isolate_model_code(trust_remote_code)
            limits = replace(limits, devices=pick_devices(device, given))
            if len(limits.devices) == 1:
                machine.limit_memory(limits.devices, vram_limit)
            for around in joining:
                around.begin(limits.devices, lambda what: view.show(Warning(what)))
            welcomed = question.answered if question else lambda: None

            def take_part(limits: volunteer.VolunteerLimits, around: Sequence[Joining]) -> int:
                def session(again: bool) -> volunteer.VolunteerSession:
                    nonlocal url
                    one = volunteer.VolunteerSession(url, limits, view, around)
                    try:
                        one.take_part(max(wait, RETURN_WITHIN) if again else wait, line, welcomed)
                    finally:
                        url = one.url  # of another hub, where one has taken over
                    return one

                return volunteer.take_turns(around, session, not yes, view.show)

            me = TakingPart(url, limits, view.show, wait, welcomed, take_part)
            ways = (status for one in joining if (status := one.run(me)) is not None)
            if (status := next(ways, None)) is None:
                status = take_part(limits, joining)
        except StopAsked:
            view.show(Progressed(f"not joined ({stop.reason}): nothing was downloaded"))
            status = EXIT["lost"] if stop.reason == "SIGTERM" else 0
    if status:
        raise typer.Exit(status)
