"""`cocktail report`: write a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from xml.etree.ElementTree import Element

import typer

from cocktail_cli.machine import load_run
from cocktail_cli.options import Json, Quiet, RunArgument

if TYPE_CHECKING:
    from cocktail_cli.dashboard import RunHistory

FILE = "report.html"


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help=f"Default: {FILE} in the run's folder.", show_default=False
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

    With --json one object: report, bytes.
    """
    from cocktail_cli.dashboard import RunFolderReader

    record = load_run(run)
    told = RunFolderReader(record).look()
    if text:
        typer.echo("\n".join(as_text(told)))
        return
    path = (output or Path(record.output_dir) / FILE).absolute()
    path.write_text(as_html(told), encoding="utf-8")
    size = path.stat().st_size
    if as_json:
        typer.echo(json.dumps({"v": 1, "report": str(path), "bytes": size}))
    else:
        typer.echo(str(path))
        if not quiet:
            typer.echo(f"{size / 1000:.0f} kB, no network needed to view it.", err=True)
    if open_:
        import webbrowser

        webbrowser.open(path.as_uri())


def as_html(c: RunHistory) -> str:
    from cocktail_cli.dashboard import document, el, read_part, section, sections, utc

    style = read_part("style.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    # forbids the browser to load or run anything, whatever the file contains
    policy = f"default-src 'none'; style-src 'sha256-{digest}'"
    head = [el("meta", http_equiv="Content-Security-Policy", content=policy), el("style", style)]
    again = section("again", "How to do it again", el("ol", *(el("li", *step) for step in steps(c))))
    main = el("main", *sections(c), again, *versions(c))
    for details in main.iterfind("section[@id='recipe']/details"):
        details.set("open", "")
    foot = el("footer", f"Written from the run's ledger and diary, as of {utc(c.seen or 0.0)}.")
    return document(c, head, [], main, foot)


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
    from cocktail_cli.dashboard import participants, words
    from cocktail_cli.ui import glyphs_for, megabytes, text_chart

    yield from words(c)
    held, glyphs = [(float(e.step), e.loss) for e in c.evaluations], glyphs_for(sys.stdout.encoding)
    if chart := text_chart(c.losses, held, 78, 14, glyphs):
        yield ""
        yield f"Loss by step; {glyphs.mark} on held-out data:"
        yield from (line.text for line in chart)
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
    yield c.about.recipe_text.rstrip()
