"""`cocktail status`: one screen about a run, from its hub; or the runs that this machine knows."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import typer

from cocktail_cli.assembly import ask_status, everyone, url_to_dial
from cocktail_cli.completion import run_names
from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line, readable
from cocktail_cli.machine import RunRecord, load_run, the_run_going_on
from cocktail_cli.options import Json, NoColor, Quiet, argument, flag
from cocktail_cli.ui import (
    Display,
    duration_text,
    megabytes,
    open_board,
    say,
    short,
    table,
    timestamp,
)

TIMEOUT = 10.0  # seconds for an answer
EVERY = 2.0  # seconds between two requests of --watch
PATIENCE = 30  # requests that a hub may leave unanswered
WHO = {"PEER": "<", "HARDWARE": "<", "STATE": "<"}  # columns of a peer, and how they are aligned
BRIEF = WHO | {"UP": ">", "DOWN": ">", "SHARE": ">"}
OTHERS = "SHARE TOKENS UP DOWN RTT SEEN SINCE ROUNDS LATE COMPUTE WAIT FETCHED"
ALL = WHO | dict.fromkeys(OTHERS.split(" "), ">")
OVER = ("paused", "finished", "stopped", "failed")


def status(
    run: Annotated[
        str | None,
        argument("RUN_URL|RUN", "Default: the run that goes on here.", run_names, show_default=False),
    ] = None,
    watch: Annotated[bool, flag("--watch -w", "Keep showing it until Ctrl-C or the end of the run.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Show all that the hub knows of each peer.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> None:
    """Show the progress of a run.

    Examples: cocktail status amber-otter-42
    cocktail status cocktail://... --watch

    With --watch a table on a terminal; elsewhere, and with -q or --json, a line for each change.

    With --json one object: run, state (waiting, running, paused, finished, stopped, failed), reason (of its
    end), term (starts of the hub; far more after a standby took over),
    step, max_steps, loss, eval_loss, losses and eval_losses (while it runs: pairs of step and loss, 128
    at most), tokens, tokens_per_s, samples, grad_norm, eta_s, since_s, checkpoint (round of the newest
    snapshot), parameters, local_steps, passing (whether peers pass packets on), recipe_hash, reach (of a run
    of this machine), peers (the first by name, where they are thousands), each with name, gpu, state
    (syncing, waiting, in line, training, behind, standby, lost, done), turn (place in line), share, tokens,
    up_bytes, down_bytes, fetched_bytes (of these: before it was ready), rtt_ms, last_seen_s, joined_s,
    rounds, left_out, compute_s, wait_s; peer_count (of all of them); bottleneck (of the last
    rounds: line, waiting, bytes_per_s; null: not known yet); stages (of machines that lend memory:
    rings, each its machines by stage with name and layers; waiting; null: there are none);
    culprits (who has lengthened the last rounds), each with peer, cause, evidence, remedy, lengthened (by
    what share), round, since; and others: peers that are not in the run (deciding, left, lost, removed).
    """
    run = run or the_run_going_on().run
    if watch:
        words = partial(in_short, as_json=as_json) if as_json or quiet else line_of
        with suppress(KeyboardInterrupt):
            display = Display(color=not no_color)
            watched(run, words, display if words is line_of and display.live(sys.stdout) else None)
        return
    found = ask(run)
    if as_json or quiet:
        say(in_short(found, as_json))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in screen(found, peers, width):
        say(line)
    if next_step := after(found):
        say(f"Next: {next_step}", err=True)


def in_short(found: dict[str, Any], as_json: bool) -> str:
    """Format a status for programs: a JSON object, or its four words."""
    if as_json:
        return json.dumps({"v": 1, **found})
    return f"{found['state']} {found['step']}/{found['max_steps']} {found['loss']} {peers_of(found)}"


def peers_of(found: dict[str, Any]) -> int:
    """Count the peers, also those that a status does not list."""
    return int(found.get("peer_count", len(found["peers"])))


def after(found: dict[str, Any]) -> str:
    """Return the next command for a run that does not go on."""
    if found["state"] in ("finished", "stopped") and found["step"] and "output_dir" in found:
        return f'cocktail report {found["run"]} · cocktail generate {found["output_dir"]} "Once upon a time"'
    return f"cocktail resume {found['run']}" if found["state"] == "paused" else ""


# ---- again and again ---------------------------------------------------------------------------------------


def watched(run: str, line: Callable[[dict[str, Any]], str], display: Display | None) -> None:
    """Show the status until the run is over: on a terminal's board, or without one a line for each change."""
    if display is not None:
        view = open_board(sys.stdout, sys.stdout, display.color)
        try:
            for found in answers_of(run):
                view.watch(found)
        finally:
            view.close()
        return
    told: tuple[Any, ...] = ()
    for found in answers_of(run):
        seen = found["state"], found["step"], [peer["name"] for peer in found["peers"]]
        if seen != told:
            say(line(found))
            sys.stdout.flush()
        told = seen


def answers_of(run: str) -> Iterator[dict[str, Any]]:
    """Yield the status until the run has ended. Meanwhile the hub may restart, or write the model."""
    from transport.protocol import Unreachable

    found = ask(run)
    silent = 0
    while True:
        if not silent:
            yield found
            if found["state"] in OVER:
                return
        time.sleep(EVERY)
        try:
            found, silent = ask(run), 0
        except (Failure, Unreachable):
            silent += 1
            if silent > PATIENCE:
                raise


def line_of(found: dict[str, Any]) -> str:
    """Format as `2026-11-20T14:02:40Z running step=131/452 loss=1.8420 peers=2 tok_s=1900 eta_s=3360`."""
    fields = [timestamp(), found["state"], f"step={found['step']}/{found['max_steps']}"]
    fields += [f"{key}={found[key]:.4f}" for key in ("loss", "eval_loss") if found.get(key) is not None]
    fields.append(f"peers={peers_of(found)}")
    if found.get("tokens_per_s"):
        fields.append(f"tok_s={found['tokens_per_s']:.0f}")
    if found.get("eta_s") and found["state"] == "running":
        fields.append(f"eta_s={found['eta_s']}")
    return " ".join(fields)


# ---- one screen --------------------------------------------------------------------------------------------


def ask(run: str) -> dict[str, Any]:
    """Ask the hub for the status; read run.json after its end. Raises Failure (run_unknown, unreachable)."""
    from transport import parse_url
    from transport.protocol import Unreachable

    if run.startswith("cocktail:"):
        return readable(ask_status(url_to_dial(run), TIMEOUT))
    record = load_run(run)
    if record.state != "running":
        return remembered(record)
    try:
        return readable(ask_status(parse_url(record.local_url()), TIMEOUT)) | {"reach": record.reach}
    except Unreachable as error:
        raise unreachable(record, error) from error


def unreachable(record: RunRecord, error: Exception) -> Failure:
    """Make the failure of a run of this machine whose hub does not answer."""
    return Failure(
        "unreachable",
        f"the hub of {record.run} (process {record.pid}): {error}",
        hints=(
            "if it was stopped just now, its model is being written: ask again",
            f"if it was killed, what is committed is kept: cocktail resume {record.run} goes on with it",
            f"cocktail export {record.run} -o DIR makes a model of it",
        ),
    )


def remembered(record: RunRecord) -> dict[str, Any]:
    """Describe a finished run with the fields of a running one."""
    return {
        "run": record.run,
        "state": record.state,
        "step": record.steps,
        "max_steps": record.planned or record.steps,
        "loss": None,
        "reason": record.reason,
        "eval_loss": record.eval_loss,
        "peers": [],
        "output_dir": record.output_dir,
    }


def screen(found: dict[str, Any], in_full: bool = False, width: int | None = None) -> Iterator[str]:
    """Yield a run's lines for people: the run, then each peer. `width`: of the terminal."""
    parts = [str(found["run"]), str(found["state"]), f"step {found['step']}/{found['max_steps']}"]
    for key, label in (("loss", "loss"), ("eval_loss", "eval")):
        if found.get(key) is not None:
            parts.append(f"{label} {found[key]:.4f}")
    if found.get("eta_s"):
        parts.append(f"ETA {duration_text(found['eta_s'])}")
    yield " · ".join(parts)
    if found.get("reason"):
        yield str(found["reason"])
    for one in everyone():
        yield from one.above_peers(found)
    if found.get("reach"):
        yield f"reach: {found['reach']}"
    if in_full:
        yield from table(ALL, map(all_of, found["peers"]), width)
    else:
        yield from table(BRIEF, map(brief, [*found["peers"], *found.get("others", ())]))
    if (more := peers_of(found) - len(found["peers"])) > 0:
        yield f"and {more:,} more peers"
    for one in everyone():
        yield from one.below_peers(found)


def brief(peer: dict[str, Any]) -> list[str]:
    traffic = (megabytes(peer.get(key) or 0) for key in ("up_bytes", "down_bytes"))
    return [*words_of(peer, "name", "gpu", "state"), *traffic, f"{100 * (peer.get('share') or 0):.0f}%"]


def all_of(peer: dict[str, Any]) -> list[str]:
    return [
        *words_of(peer, "name", "gpu", "state"),
        f"{100 * peer['share']:.0f}%",
        *(short(peer[key]) for key in ("tokens", "up_bytes", "down_bytes")),
        "-" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.0f} ms",
        *(duration_text(peer[key]) for key in ("last_seen_s", "joined_s")),
        *(f"{peer[key]:,}" for key in ("rounds", "left_out")),
        *(duration_text(peer[key]) for key in ("compute_s", "wait_s")),
        short(peer["fetched_bytes"]),
    ]


def words_of(peer: dict[str, Any], *keys: str) -> list[str]:
    return [one_line(str(peer.get(key) or ""), 20) for key in keys]
