"""`cocktail dashboard`: a run as a page in the browser, served on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from cocktail_cli import options
from cocktail_cli.completion import run_names
from cocktail_cli.errors import Failure
from cocktail_cli.host import LifeLine
from cocktail_cli.machine import RunRecord, load_run, reread_run, the_run_going_on
from cocktail_cli.ui import say, say_json
from cocktail_cli.volunteer import read_url

from .report_command import report as report

if TYPE_CHECKING:
    from .report_page import Document
    from .run_history import RunHistory

LAST_LOOK = 5.0  # seconds that the page of a launch outlives it, so that viewers see how it ended


def dashboard(
    runs: Annotated[
        list[str] | None,
        options.argument(
            "[RUN_URL|RUN]...",
            "Default: the run that goes on here. @FILE, -: the URL from a file or stdin.",
            run_names,
            show_default=False,
        ),
    ] = None,
    bind: Annotated[
        str, options.value("--bind", "ADDRESS", "0.0.0.0 lets other machines look too.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, options.port("TCP port (default: 29480, or a free one).", show_default=False)
    ] = None,
    life_line: options.LifeLine = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show a run as a page in the browser, until Ctrl-C. Works offline, also when the run is over.

    Prints the address. The key after its # makes the page show the join line too; without it the page is
    read-only. From elsewhere: ssh -L 29480:127.0.0.1:29480 HOST, then open it at home.

    Examples: cocktail dashboard
    cocktail dashboard amber-otter-42 --port 8000
    cocktail dashboard amber-otter-42 rusty-heron-7 (compared on one page)

    With --json one object: url, read_only.
    """
    import secrets

    from .web_server import application, listen, server

    look, join_line = page_source(runs or [])
    key = secrets.token_urlsafe(18)
    app = application(look, key, join_line)
    with listen(bind, port) as sock:
        host, number = sock.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        address = f"http://{shown}:{number}/"
        if as_json:
            say_json({"url": f"{address}#key={key}", "read_only": address})
        else:
            say(f"{address}#key={key}")
            if not quiet:
                say(f"Read-only: {address}   Ctrl-C ends the page, not the run.", err=True)
        sys.stdout.flush()
        if life_line:
            LifeLine(grace=LAST_LOOK)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after an orderly end
            server(app).run(sockets=[sock])


def page_source(runs: list[str]) -> tuple[Callable[[], Document], Callable[[], str]]:
    """Return functions for the page of a run, or of several compared, and for the join line of one."""
    from .report_page import check_comparable, page_of

    if sum(run.startswith("cocktail:") or run == "-" for run in runs) > 1:
        hint = "the others as @FILE: what is typed can be read by every user of this machine"
        raise Failure("usage", "more than one run URL on the command line", hints=(hint,))
    names: list[str | None] = [*runs]
    sources = [source_of(run) for run in names or [None]]
    looks, (join_line, *others) = [look for look, _ in sources], [line for _, line in sources]
    if others:
        check_comparable([look().about.run for look in looks])
    return lambda: page_of([look() for look in looks]), (lambda: "") if others else join_line


def source_of(run: str | None) -> tuple[Callable[[], RunHistory], Callable[[], str]]:
    """Return a function that reads a run, and one for its join line.

    Raises:
        Failure: run_unknown, usage.
        RefusedByHub, Unreachable: of a run elsewhere.
    """
    from .run_history import RunFolderReader

    if run is None:
        run = the_run_going_on().run
    if run == "-" or run.startswith("@"):
        run = read_url(run).strip()  # argv can be read by every user of the machine
    if run.startswith("cocktail:"):
        from .run_history import RemoteReader

        remote = RemoteReader(run)
        remote.watch()
        return remote.look, lambda: f"cocktail join {run}"
    record = load_run(run)
    reader = RunFolderReader(record)
    reader.look()  # an unreadable run is found now
    return reader.look, lambda: invitation(reread_run(record))


def invitation(record: RunRecord) -> str:
    """Return the current join line: the host may have rotated its token."""
    return f"cocktail join {record.url}" if record.state == "running" else ""
