"""`cocktail report`: write a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from xml.etree.ElementTree import Element

import typer

from cocktail_cli.completion import run_names
from cocktail_cli.machine import load_run
from cocktail_cli.options import Json, Quiet, RunArgument
from cocktail_cli.ui import MARK, megabytes, say, say_json, say_own, showable, text_chart

if TYPE_CHECKING:
    from cocktail_cli.dashboard import Page, RunHistory

FILE, COMPARISON = "report.html", "comparison.html"
MARKS = 24  # points of the other run's curve in a text chart


def report(
    run: RunArgument,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="RUN",
            help="Compare with this run instead: curves, figures, recipes. Repeatable.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"Default: {FILE} (with --with: {COMPARISON}) in the run's folder.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the report as text, and write no file.")
    ] = False,
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
    from cocktail_cli.dashboard import RunFolderReader, check_comparable

    record, others = load_run(run), [load_run(name) for name in with_ or ()]
    if others:
        check_comparable([record.run, *(other.run for other in others)])
    told = RunFolderReader(record).look()
    runs = [told, *(RunFolderReader(other).look() for other in others)]
    if text:
        lines = comparison_as_text(runs) if others else as_text(told)
        say(*(showable(line, sys.stdout.encoding) for line in lines))
        return
    path = (output or Path(record.output_dir) / (COMPARISON if others else FILE)).absolute()
    path.write_text(comparison_as_html(runs) if others else as_html(told), encoding="utf-8")
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


def as_html(c: RunHistory) -> str:
    from cocktail_cli.dashboard import el, page_of, section, utc

    page = page_of(c)
    again = section("again", "How to do it again", el("ol", *(el("li", *step) for step in steps(c))))
    main = el("main", *page.sections, again, *versions(c))
    for details in main.iterfind("section[@id='recipe']/details"):
        details.set("open", "")
    foot = el("footer", f"Written from the run's ledger and diary, as of {utc(c.seen or 0.0)}.")
    return self_contained(page, main, foot)


def comparison_as_html(runs: Sequence[RunHistory]) -> str:
    from cocktail_cli.dashboard import compared, el, utc

    page = compared(runs)
    foot = el("footer", f"Written from the runs' ledgers, as of {utc(max(c.seen or 0.0 for c in runs))}.")
    return self_contained(page, el("main", *page.sections), foot)


def self_contained(page: Page, main: Element, foot: Element) -> str:
    """Render one file that loads nothing from elsewhere."""
    from cocktail_cli.dashboard import document, el, read_part

    style = read_part("style.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # forbids the browser to load or run anything, whatever the file contains
    policy = f"default-src 'none'; style-src 'sha256-{digest}'"
    head = [el("meta", http_equiv="Content-Security-Policy", content=policy), el("style", style)]
    return document(page, head, [], main, foot)


def steps(c: RunHistory) -> Iterator[list[Element | str]]:
    """Render the commands that repeat the run, and what makes it the same."""
    from cocktail_cli.dashboard import el

    about, peers = c.about, max((len(r.members) for r in c.rounds), default=1)
    file = f"{about.recipe}.yaml"
    if about.recipe_text:
        yield [f"Save the recipe above as {file}; the host's data files are in it by their names."]
    yield [el("code", f"cocktail launch {file} --peers {peers}"), " (or fewer, and others join)"]
    yield ["It is the same base model if the sha256 of its files is ", el("code", about.base_sha256)]
    yield ["They are the same data if their sha256, tokenized, is ", el("code", about.data_sha256)]
    yield [
        "The same model to the bit is the base plus the packets in the run's ledger, at its host: ",
        el("code", f"cocktail export {about.run} -o DIR"),
        ". A second run differs by who takes part in which round, which machines and lines decide.",
    ]


def versions(c: RunHistory) -> Iterator[Element]:
    from cocktail_cli.dashboard import el, section

    if c.about.versions:
        listed = el("ul", *(el("li", f"{name} {found}") for name, found in c.about.versions.items()))
        yield section("versions", "Versions on the host's machine", listed)


def as_text(c: RunHistory) -> Iterator[str]:
    """Format the report for a terminal: words, the loss curve, samples, contributors."""
    from cocktail_cli.dashboard import evaluations, participants, words

    yield from words(c)
    if chart := text_chart(c.losses, evaluations(c), 78, 14):
        yield ""
        yield f"Loss by step; {MARK} on held-out data:"
        yield from chart
    newest = {one.prompt: one for one in c.samples}
    for said in newest.values():
        yield ""
        yield f"Sample of step {said.step}: {said.prompt!r}"
        yield f"  the model:     {said.text!r}"
        yield f"  held-out text: {said.reference!r}"
    if participants(c):
        yield ""
        head = f"{'PEER':<24} {'SAMPLES':>9} {'ROUNDS':>7} {'LEFT OUT':>8}"
        yield f"{head} {'SENT':>9} {'RECEIVED':>9}  HARDWARE"
    for one in participants(c):
        did = f"{one.peer[:24]:<24} {one.samples:>9,} {one.rounds:>7,} {one.left_out:>8,}"
        yield f"{did} {megabytes(one.up):>9} {megabytes(one.down):>9}  {one.hardware}"
    yield ""
    yield "To do it again:"
    for number, step in enumerate(steps(c), 1):
        yield f"{number}. " + "".join(part if isinstance(part, str) else part.text or "" for part in step)
    if c.about.versions:
        yield ""
        yield "Versions: " + ", ".join(f"{name} {found}" for name, found in c.about.versions.items())
    yield ""
    yield f"Recipe (sha256 of it in full: {c.about.recipe_hash}):"
    yield from c.about.recipe_text.rstrip().split("\n")


def comparison_as_text(runs: Sequence[RunHistory]) -> Iterator[str]:
    """Format a comparison for a terminal: the curves of each pair, figures, keys that differ."""
    from cocktail_cli.dashboard import downsample, figure_table, recipe_differences

    first, *others = runs
    for other in others:
        chart = text_chart(first.losses, downsample(other.losses, MARKS), 78, 14)
        yield f"Loss by step: the line is {first.about.run}, {MARK} is {other.about.run}"
        yield from chart
        yield ""
    head, rows = figure_table(runs)
    yield from aligned([head, *rows])
    yield ""
    different = recipe_differences(runs)
    yield (
        "Recipe keys that differ:" if different else "The recipes, the base models and the data are the same."
    )
    yield from aligned(different)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format rows in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
