"""`cocktail report`: write a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail_cli.completion import run_names
from cocktail_cli.machine import load_run
from cocktail_cli.options import Json, Quiet, RunArgument, flag, value
from cocktail_cli.ui import MARK, say, say_json, say_own, showable, text_chart

if TYPE_CHECKING:
    from .report_page import Document

FILE, COMPARISON = "report.html", "comparison.html"


def report(
    run: RunArgument,
    with_: Annotated[
        list[str] | None,
        value(
            "--with",
            "RUN",
            "Compare with this run instead: curves, figures, recipes. Repeatable.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        value(
            "--output -o",
            "FILE",
            f"Default: {FILE} (with --with: {COMPARISON}) in the run's folder.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[bool, flag("--text", "Print the report as text, and write no file.")] = False,
    open_: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
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
