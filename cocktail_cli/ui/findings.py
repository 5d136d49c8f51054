"""Findings to the eye: a line each, `ok`, `warn` or `fail`, and the exit status they come to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from cocktail_cli.errors import EXIT, explain

if TYPE_CHECKING:
    from recipes.errors import Finding


def tell(
    findings: Iterable[Finding],
    as_json: bool,
    quiet: bool,
    failure: str,
    strict: bool = False,
    **beside: object,
) -> int:
    """Print the findings, each as it comes; as JSON one object, `beside` in it. Returns the exit status.

    Args:
        quiet: what is well is not told.
        failure: the key of EXIT for a check that failed without an error of its own.
        strict: a warning is a failure.
    """
    told: list[Finding] = []
    for finding in findings:
        told.append(finding)
        if not as_json and not (quiet and finding.level == "ok"):
            typer.echo(line(finding))
    if as_json:
        rows = [{"level": f.level, "about": f.about, "text": f.text, "hint": f.hint} for f in told]
        typer.echo(json.dumps({"v": 1, **beside, "findings": rows}))
    return status(told, failure, strict)


def line(finding: Finding) -> str:
    """`warn  disk      31 GB free ...   hint: ...`"""
    text = " ".join(finding.text.split())
    hint = f"   hint: {finding.hint}" if finding.hint else ""
    return f"{finding.level:<5} {finding.about:<9} {text}{hint}"


def status(findings: Iterable[Finding], failure: str, strict: bool) -> int:
    """0, or what the first failure is worth."""
    counts = ("fail", "warn") if strict else ("fail",)
    for finding in findings:
        if finding.level in counts:
            return explain(finding.error).exit if finding.error else EXIT[failure]
    return 0
