"""`cocktail status`: one screen about a run, asked of its hub; or the runs this machine knows."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from cocktail_cli.board import megabytes, printable
from cocktail_cli.completion import run_names
from cocktail_cli.errors import Failure
from cocktail_cli.options import Json, Quiet
from cocktail_cli.runs import RunRecord, known_runs, load

TIMEOUT = 10.0  # seconds for an answer


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN_URL|RUN",
            help="Nothing: the runs this machine knows.",
            show_default=False,
            autocompletion=run_names,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show how a run fares.

    Example: cocktail status amber-otter-42

    With --json one object: run, state (waiting, running, finished, failed), step, max_steps, loss, eval_loss,
    losses and eval_losses (while it runs: pairs of step and loss, 128 at most), tokens, tokens_per_s, eta_s,
    since_s, parameters, local_steps, recipe_hash, reach (of a run of this machine), and peers, each with
    name, gpu, state, share, tokens, up_bytes, down_bytes, fetched_bytes (of these: before it was ready),
    rtt_ms, last_seen_s, joined_s, rounds, left_out, compute_s, wait_s.
    """
    if run is None:
        list_runs(as_json, quiet)
        return
    found = ask(run)
    if as_json:
        typer.echo(json.dumps({"v": 1, **found}))
    elif quiet:
        typer.echo(
            f"{found['state']} {found['step']}/{found['max_steps']} {found['loss']} {len(found['peers'])}"
        )
    else:
        for line in screen(found):
            typer.echo(line)


def ask(run: str) -> dict[str, Any]:
    """The hub's answer; what run.json says where a known run is over and its hub gone.

    Raises:
        Failure: run_unknown, or unreachable where the hub should run and does not answer.
    """
    from transport import ask_status, parse_url
    from transport.errors import Unreachable

    if run.startswith("cocktail:"):
        return ask_status(parse_url(run), TIMEOUT)
    record = load(run)
    if record.state != "running":
        return remembered(record)
    try:
        return ask_status(parse_url(record.local_url()), TIMEOUT) | {"reach": record.reach}
    except Unreachable as error:
        raise unreachable(record, error) from error


def unreachable(record: RunRecord, error: Exception) -> Failure:
    """A run of this machine whose hub does not answer."""
    return Failure(
        "unreachable",
        f"the hub of {record.run} (process {record.pid}): {error}",
        hints=(f"if it was killed, what is committed is kept: cocktail export {record.run} -o DIR",),
    )


def remembered(record: RunRecord) -> dict[str, Any]:
    """A finished run in the words of a running one."""
    return {
        "run": record.run,
        "state": record.state,
        "step": record.steps,
        "max_steps": record.planned or record.steps,
        "loss": None,
        "eval_loss": record.eval_loss,
        "peers": [],
        "output_dir": record.output_dir,
    }


def screen(found: dict[str, Any]) -> Iterator[str]:
    """A run for people: a line for the run, a line for each peer."""
    parts = [str(found["run"]), str(found["state"]), f"step {found['step']}/{found['max_steps']}"]
    for key, label in (("loss", "loss"), ("eval_loss", "eval")):
        if found.get(key) is not None:
            parts.append(f"{label} {found[key]:.4f}")
    if found.get("eta_s"):
        parts.append(f"ETA {found['eta_s'] // 60:.0f} min")
    yield " · ".join(parts)
    if found.get("reach"):
        yield f"reach: {found['reach']}"
    if found["peers"]:
        yield f"{'PEER':<20} {'HARDWARE':<20} {'STATE':<9} {'UP':>9} {'DOWN':>9} {'SHARE':>6}"
    for peer in found["peers"]:
        name, gpu, state = (printable(str(peer.get(key) or "")) for key in ("name", "gpu", "state"))
        up, down = megabytes(peer.get("up_bytes") or 0), megabytes(peer.get("down_bytes") or 0)
        share = 100 * (peer.get("share") or 0)
        yield f"{name:<20} {gpu[:20]:<20} {state:<9} {up:>9} {down:>9} {share:>5.0f}%"


def list_runs(as_json: bool, quiet: bool) -> None:
    """The runs of this machine, without their secrets."""
    records = [
        replace(r, state="died") if r.state == "running" and not answers(r) else r for r in known_runs()
    ]
    if as_json:
        shown = [
            {key: value for key, value in asdict(r).items() if key not in ("url", "keys")} for r in records
        ]
        typer.echo(json.dumps({"v": 1, "runs": shown}))
        return
    for record in records:
        typer.echo(
            record.run
            if quiet
            else f"{record.run:<24} {record.state:<9} {record.recipe:<20} {record.output_dir}"
        )
    if not records and not quiet:
        typer.echo("No runs were launched on this machine yet. Next: cocktail launch smoke", err=True)


def answers(record: RunRecord) -> bool:
    """Whether anything listens where the run's hub should."""
    from transport import parse_url

    hub = parse_url(record.local_url())
    try:
        socket.create_connection((hub.host, hub.port), timeout=1.0).close()
    except OSError:
        return False
    return True
