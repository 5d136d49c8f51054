"""Print the findings of a check, one line each, and derive the exit status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import typer

from cocktail_cli.assembly import reader_of
from cocktail_cli.errors import EXIT, explain

from .output import say, say_json

if TYPE_CHECKING:
    from recipes.errors import Finding


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
    from recipes.errors import Finding

    return Finding(level, about, text, hint)
