"""The one way out for all that people read, so no text of others commands their terminal.

`say` writes lines: one text is one line, whatever is in it. `guarded_output` makes the streams themselves
safe, for what libraries and tracebacks write past it. JSON is ASCII: no terminal obeys what it carries.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TextIO, cast

import typer

from cocktail_cli.assembly import reader_of
from cocktail_cli.errors import EXIT, explain
from cocktail_cli.foreign_text import one_line, paragraphs
from recipes.errors import Finding

Style = dict[str, Any]  # arguments of typer.style


class GuardedStream:
    """A text stream that writes no control characters of others; line feeds alone move its cursor.

    Args:
        made: what is written of a text.
    """

    def __init__(self, stream: TextIO, made: Callable[[str], str] = paragraphs) -> None:
        self.unguarded, self.made = stream, made

    def write(self, text: str) -> int:
        self.unguarded.write(self.made(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Guard this process's output and error streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and cast("TextIO", GuardedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guard, for styles and cursor movements of our own."""
    return stream.unguarded if isinstance(stream, GuardedStream) else stream


def put(line: str, file: TextIO, end: str = "\n") -> None:
    """Write one line to a stream, whatever characters it has."""
    print(one_line(line, None), file=file, end=end, flush=True)


def put_own(text: str, file: TextIO) -> None:
    """Write what this machine has named, to the letter, for programs that go on with it; a control character
    in it is replaced all the same."""
    exact = not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
    print(text if exact else one_line(text), file=unguarded(file), flush=True)


def say(*lines: str, err: bool = False) -> None:
    """Write lines for people, each of them one line."""
    for line in lines:
        put(line, sys.stderr if err else sys.stdout)


def say_text(text: str) -> None:
    """Write a text of several lines, such as a file or a model's words."""
    print(paragraphs(text), flush=True)


def table(
    columns: Mapping[str, str], rows: Iterable[Sequence[str]], width: int | None = None
) -> Iterator[str]:
    """Yield titles and rows, unless there is no row. `columns`: title -> `<` or `>`, its alignment.

    The last ones are left out where `width` is too small, but for the first three.
    """
    from rich.cells import cell_len  # here, as `cocktail --help` must be fast

    lines = [list(columns), *rows]
    if len(lines) == 1:
        return
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    while width is not None and sum(widths) + len(widths) > width and len(widths) > 3:
        widths.pop()
    for line in lines:
        cells = zip(line, columns.values(), widths, strict=False)
        filled = (f"{cell:{align}{wide - cell_len(cell) + len(cell)}}" for cell, align, wide in cells)
        yield " ".join(filled).rstrip()


def say_own(text: str) -> None:
    """Write a path of this machine, or a run URL, as `put_own`."""
    put_own(text, sys.stdout)


def say_json(fields: Mapping[str, Any]) -> None:
    """Write an object of `--json`, version 1, on a line of its own."""
    print(json.dumps({"v": 1, **fields}), flush=True)


def say_styled(parts: Iterable[tuple[str, Style]]) -> None:
    """Write a text whose parts have styles."""
    text = "".join(
        typer.style(paragraphs(part), **style) if style else paragraphs(part) for part, style in parts
    )
    typer.echo(text, file=unguarded(sys.stdout), color=True)  # it knows the consoles of Windows


def print_findings(
    findings: Iterable[Finding],
    as_json: bool,
    quiet: bool,
    failure: str,
    strict: bool = False,
    **beside: object,
) -> None:
    """Print findings as they come, or as one JSON object with the fields of `beside`.

    Args:
        quiet: omit findings of level `ok`.
        failure: the key of EXIT for a failed check that carries no error.
        strict: count a warning as a failure.

    Raises:
        Exit: with the exit status of the first failure.
    """
    told: list[Finding] = []
    for finding in findings:
        finding = replace(finding, hint=finding.hint or reader_of(finding.error))
        told.append(finding)
        if not as_json and not (quiet and finding.level == "ok"):
            hint = f"   hint: {finding.hint}" if finding.hint else ""
            say(f"{finding.level:<5} {finding.about:<9} {' '.join(finding.text.split())}{hint}")
    if as_json:
        rows = [{"level": f.level, "about": f.about, "text": f.text, "hint": f.hint} for f in told]
        say_json({**beside, "findings": rows})
    counts = ("fail", "warn") if strict else ("fail",)
    for finding in told:
        if finding.level in counts:
            raise typer.Exit(explain(finding.error).exit if finding.error else EXIT[failure])


def found(level: Literal["ok", "warn", "fail"], about: str, text: str, hint: str = "") -> Finding:
    """Create a finding of a check."""
    return Finding(level, about, text, hint)
