"""`cocktail dashboard`: a run as a page in the browser, served on this machine; `cocktail report`: as one
self-contained HTML file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cocktail_cli import options
from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line
from cocktail_cli.host import LifeLine
from cocktail_cli.installation import command_elsewhere
from cocktail_cli.machine import load_run, reread_run, the_run_going_on
from cocktail_cli.options import Json, Quiet, RunArgument, flag, run_names, value
from cocktail_cli.ui import MARK, say, say_json, say_own, showable, text_chart
from cocktail_cli.volunteer import read_url

if TYPE_CHECKING:
    from .report_page import Document
    from .run_history import RunHistory

    Look = Callable[[], Sequence[RunHistory]]

FILE, COMPARISON = "report.html", "comparison.html"
WITH = "Compare with this run instead: curves, figures, recipes. Repeatable."
OUTPUT = f"Default: {FILE} (with --with: {COMPARISON}) in the run's folder."
RUNS = "Default: the run that goes on here. @FILE, -: the URL from a file or stdin."
BIND = "0.0.0.0 lets other machines look too."
PORT = "TCP port (default: 29480, or a free one)."


def report(
    run: RunArgument,
    with_: Annotated[
        list[str] | None, value("--with", "RUN", WITH, show_default=False, autocompletion=run_names)
    ] = None,
    output: Annotated[Path | None, value("--output -o", "FILE", OUTPUT, show_default=False)] = None,
    text: Annotated[bool, flag("--text", "Print the report as text, and write no file.")] = False,
    open_: Annotated[bool, flag("--open", "Open the report in the browser.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write what became of a run as one HTML file.

    It has curves, peers, contributors, recipe and versions, and no secret: it can be passed on.

    Examples: cocktail report amber-otter-42
    cocktail report amber-otter-42 -o report.html --open
    cocktail report amber-otter-42 --with rusty-heron-7

    With --json one object: report, bytes.
    """
    from .report_page import check_comparable, page_of
    from .run_history import RunFolderReader

    records = [load_run(name) for name in (run, *(with_ or ()))]
    check_comparable([record.run for record in records])
    page = page_of([RunFolderReader(record).look() for record in records])
    if text:
        say(*(showable(line, sys.stdout.encoding) for line in as_text(page)))
        return
    path = (output or Path(records[0].output_dir) / (COMPARISON if with_ else FILE)).absolute()
    path.write_text(as_html(page), encoding="utf-8")
    size = path.stat().st_size
    if as_json:
        say_json({"report": str(path), "bytes": size})
    else:
        say_own(str(path))
        if not quiet:
            say(f"{size / 1000:.0f} kB, no network needed to view it.", err=True)
    if open_:
        import webbrowser

        webbrowser.open(path.as_uri())


def as_html(page: Document) -> str:
    """Put the page, all that it loads, and its run into one file that loads nothing."""
    from .web_server import PARTS, read_part

    style, script = (
        "\n".join(read_part(name) for name, found in PARTS.items() if found == kind)
        for kind in ("text/css", "text/javascript")
    )
    policy = f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}"
    run = json.dumps(page).replace("<", "\\u003c")  # no text in it can end the element
    html = re.sub(r"<(link|script) .*\n", "", read_part("page.html"))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    end = f'<script id="run" type="application/json">{run}</script><script>{script}</script>'
    return html.replace("</head>", f"{head}</head>").replace("</body>", f"{end}</body>")


def digest(text: str) -> str:
    """Name an inline style or script in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_text(page: Document) -> Iterator[str]:
    """Format a page for a terminal: all that it has but bars, and charts other than those of losses."""
    for section in page["sections"]:
        lines = [line for kind, given in section["blocks"] for line in block_lines(kind, given)]
        if lines:
            yield from ("", section["title"].upper(), *lines)


def block_lines(kind: str, given: Any) -> Iterator[str]:
    """Format a block of a page."""
    if kind in ("p", "ending", "code"):
        yield from given.rstrip().split("\n")
    elif kind == "figures":
        yield from aligned([*given.items()])
    elif kind == "table":
        yield f"{given['title']}:"
        yield from aligned([given["head"], *given["rows"]])
    elif kind == "sample":
        newest = given[0]
        yield f"After {newest['prompt']!r}, at step {newest['step']}:"
        yield f"  the model:     {newest['text']!r}"
        yield f"  held-out text: {newest['reference']!r}"
    elif kind == "chart" and "loss" in given["title"].lower():
        first, *others = given["names"][1:]
        curves = [
            [(x, y) for x, y in zip(given["columns"][0], column, strict=True) if y is not None]
            for column in given["columns"][1:]
        ]
        for name, marks in zip(others or [""], curves[1:] or [[]], strict=True):
            yield given["title"] + f": the line is {first}, {MARK} is {name}" * bool(name)
            yield from text_chart(curves[0], marks, 78, 14)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


LAST_LOOK = 5.0  # seconds that the page of a launch outlives it, so that viewers see how it ended


def dashboard(
    runs: Annotated[
        list[str] | None, options.argument("RUN_URL|RUN", RUNS, run_names, show_default=False)
    ] = None,
    bind: Annotated[str, value("--bind", "ADDRESS", BIND)] = "127.0.0.1",
    port: Annotated[int | None, options.port(PORT, show_default=False)] = None,
    life_line: options.LifeLine = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show a run as a page in the browser, until Ctrl-C. Works offline, also when the run is over.

    Prints the address. The key after its # makes the page show the join line too; without it the page is
    read-only. Its /metrics are for Prometheus. From elsewhere: ssh -L 29480:127.0.0.1:29480 HOST, then open
    it at home.

    Examples: cocktail dashboard
    cocktail dashboard amber-otter-42 --port 8000
    cocktail dashboard amber-otter-42 rusty-heron-7 (compared on one page)

    With --json one object: url, read_only.
    """
    import asyncio
    import secrets

    from .web_server import Page, PageServer, listen

    look, join_line = page_source(runs or [])
    key = secrets.token_urlsafe(18)
    page = Page(look, key, join_line)
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
        with suppress(KeyboardInterrupt):
            asyncio.run(PageServer(page).serve(sock))


def page_source(runs: list[str]) -> tuple[Look, Callable[[], str]]:
    """Return functions that read a run, or several to be compared, and the lines by which one is joined."""
    from .report_page import check_comparable

    if sum(run.startswith("cocktail:") or run == "-" for run in runs) > 1:
        hint = "the others as @FILE: what is typed can be read by every user of this machine"
        raise Failure("usage", "more than one run URL on the command line", hints=(hint,))
    sources = [source_of(run) for run in runs or [the_run_going_on().run]]
    looks, (join_line, *others) = [look for look, _ in sources], [line for _, line in sources]
    if others:
        check_comparable([look().about.run for look in looks])
    return lambda: [look() for look in looks], (lambda: "") if others else join_line


def source_of(run: str) -> tuple[Callable[[], RunHistory], Callable[[], str]]:
    """Return a function that reads a run, and one for its join line.

    Raises:
        Failure: run_unknown, usage.
        RefusedByHub, Unreachable: of a run elsewhere.
    """
    from .run_history import RemoteReader, RunFolderReader

    if run == "-" or run.startswith("@"):
        run = read_url(run).strip()  # argv can be read by every user of the machine
    if run.startswith("cocktail:"):
        remote = RemoteReader(run)
        remote.watch()
        return remote.look, lambda: invitation(run, remote.known.about.invitation)
    record = load_run(run)
    reader = RunFolderReader(record)
    reader.look()  # an unreadable run is found now

    def invite() -> str:
        now = reread_run(record)  # the host may have rotated its token
        return invitation(now.url, reader.known.about.invitation) if now.state == "running" else ""

    return reader.look, invite


def invitation(url: str, how: str) -> str:
    """Return the lines that install cocktail, where a public address of it is known, and join a run; `how`
    says it where no command does."""
    joins = f"# {one_line(how, 300)}\n{url}" if how else f"cocktail join {url}"
    return "\n".join(filter(None, (command_elsewhere(), joins)))
