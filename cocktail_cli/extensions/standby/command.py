"""`cocktail standby`: hold what a run's hub has, on another machine, and take over when the hub is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cocktail_cli import options
from cocktail_cli.assembly import NONE_GIVEN, Given, places_of, url_to_dial
from cocktail_cli.errors import Failure
from cocktail_cli.machine import BIND, PORT, ListenAddress, free_address, isolate_model_code
from cocktail_cli.ui import Display, open_view

FOLDER = "outputs/standby-{run}"
URL = "The line of `cocktail launch`; - reads it from stdin."
COPY = f"Folder of the copy ({FOLDER})."
SECRETS = "The host's run.json: it needs no approval then."
ORDER = "Order the standby in DIR to take over now."


@options.with_extensions
def standby(
    run_url: Annotated[str | None, options.argument("RUN_URL", URL, show_default=False)] = None,
    output_dir: Annotated[
        Path | None, options.value("--output-dir -o", "DIR", COPY, show_default=False)
    ] = None,
    keys: Annotated[Path | None, options.value("--keys", "FILE", SECRETS, show_default=False)] = None,
    take_over: Annotated[bool, options.flag("--take-over", ORDER)] = False,
    bind: options.Bind = BIND,
    port: options.Port = None,
    advertise: options.Advertise = None,
    trust_remote_code: options.TrustCode = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = 0,
    no_color: options.NoColor = False,
    progress: options.ProgressOption = "auto",
    given: Given = NONE_GIVEN,
) -> None:
    """Follow a run, and take over when its hub is lost.

    It copies what the hub decides, commit by commit. The host approves it (`cocktail peers RUN --approve
    KEY`), or gives it run.json. It takes over when a majority of the peers has lost the hub and come here, or
    when told with --take-over. Peers learn its address meanwhile, so it must be one that they can dial.

    Examples: cocktail standby cocktail://... --advertise HOST
    cocktail standby --take-over -o outputs/standby-amber-otter-42

    With --json each line is an event, as of `launch`.
    """

    from cocktail_cli.volunteer import read_url

    from .standby_session import StandbySession, ask_take_over

    if take_over and run_url is None:
        if output_dir is None:
            raise Failure("usage", "--take-over needs the standby's folder: -o DIR")
        ask_take_over(output_dir)
        return
    if run_url is None:
        raise Failure("usage", "which run? cocktail standby RUN_URL", hints=("cocktail standby --help",))
    isolate_model_code(trust_remote_code)
    url = url_to_dial(read_url(run_url))
    at = PORT if port is None else port
    listen = free_address(ListenAddress(bind, at, advertise, port is not None, places_of(given)))
    folder = (output_dir or Path(FOLDER.format(run=url.run))).resolve()
    secrets = keys_in(keys) if keys else {}
    with open_view(Display(as_json, quiet, verbose, not no_color, progress)) as view:
        session = StandbySession(url, folder, listen, secrets, view, verbose)
        if take_over:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "take-over").touch()
        session.run()


def keys_in(path: Path) -> dict[str, str]:
    """Read the host's secrets that a standby uses. Raises Failure (usage)."""
    from recipes.foreign_json import parse_json

    try:
        found: dict[str, Any] = parse_json(path.read_bytes())["keys"]
        return {name: str(found[name]) for name in ("stop", "signing")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hints = ("copy run.json from the run's output folder, or leave --keys out",)
        raise Failure("usage", f"--keys {path}: it is no run.json of a host ({error})", hints=hints) from None
