"""`cocktail status`: one screen about a run, from its hub; `cocktail stop`: end it, or pause it; `cocktail
runs`: the runs that were launched on this machine, finished ones too; `cocktail logs`: what a run of this
machine says, also one that is detached or over.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cocktail_cli.assembly import Screen, ask_status, everyone, open_screen, url_to_dial
from cocktail_cli.errors import Failure
from cocktail_cli.foreign_text import one_line, readable
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import RunRecord, known_runs, load_run, reread_run, the_run_going_on
from cocktail_cli.options import (
    Json,
    NoColor,
    Quiet,
    RunArgument,
    argument,
    flag,
    local_peers,
    run_names,
    value,
)
from cocktail_cli.ui import (
    Display,
    Progressed,
    duration_text,
    events,
    from_json,
    generate_command,
    megabytes,
    rung_text,
    say,
    say_json,
    sentence,
    short,
    step_line,
    table,
    timestamp,
)
from recipes.foreign_json import parse_json

if TYPE_CHECKING:
    from transport import RunURL

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
    end), term (starts of the hub; far more after a takeover), step, max_steps, loss, eval_loss,
    losses and eval_losses (while it runs: pairs of step and loss, 128 at most), tokens, tokens_per_s (of the
    last rounds), samples, grad_norm, eta_s, since_s, checkpoint (round of the newest snapshot), parameters,
    local_steps, rung (its setting), need (steps whose compute an exchange of the recipe's packets takes; 0:
    unknown), recipe_hash, reach (of a run of this machine), peers (the first by name, where they are
    thousands), each with name, gpu, state (syncing, waiting, training, behind, lost, done, and others that
    extensions have), share, tokens, up_bytes, down_bytes, fetched_bytes (of these: before it was ready),
    rtt_ms, last_seen_s, joined_s, rounds, left_out, compute_s, wait_s; peer_count (of all of them); others:
    peers that are not in the run (deciding, left, lost, removed); and what extensions add: their pages tell.
    """
    run = run or the_run_going_on().run
    if watch:
        words = partial(in_short, as_json=as_json) if as_json or quiet else line_of
        with suppress(KeyboardInterrupt):
            drawn = words is line_of and Display().live(sys.stdout)
            watched(run, words, open_screen(sys.stdout, sys.stdout, not no_color) if drawn else None)
        return
    found = ask(run)
    if as_json or quiet:
        say(in_short(found, as_json))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(*screen(found, peers, width))
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
        generate = generate_command(found["output_dir"], found.get("prompt", ""))
        return " · ".join(filter(None, (f"cocktail report {found['run']}", generate)))
    return f"cocktail resume {found['run']}" if found["state"] == "paused" else ""


# ---- again and again ---------------------------------------------------------------------------------------


def watched(run: str, line: Callable[[dict[str, Any]], str], screen: Screen | None) -> None:
    """Show the status until the run is over: on a screen, or without one a line for each change."""
    if screen is not None:
        with closing(screen):
            for found in answers_of(run):
                screen.watch(found)
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
    if run.startswith("cocktail:"):
        return readable(ask_status(url_to_dial(run), TIMEOUT))
    record = load_run(run)
    if record.state != "running":
        return remembered(record)
    with hub_of(record) as url:
        return readable(ask_status(url, TIMEOUT)) | {"reach": record.reach}


@contextmanager
def hub_of(record: RunRecord) -> Iterator[RunURL]:
    """Yield where the hub of a run of this machine is. Raises Failure (unreachable) where it does not
    answer."""
    from transport import parse_url
    from transport.protocol import Unreachable

    try:
        yield parse_url(record.local_url())
    except Unreachable as error:
        hints = (
            "if it was stopped just now, its model is being written: ask again",
            f"if it was killed, what is committed is kept: cocktail resume {record.run} goes on with it",
            f"cocktail export {record.run} -o DIR makes a model of it",
        )
        said = f"the hub of {record.run} (process {record.pid}): {error}"
        raise Failure("unreachable", said, hints=hints) from error


def remembered(record: RunRecord) -> dict[str, Any]:
    """Describe a finished run with the fields of a running one."""
    return {
        "run": record.run,
        "state": record.state,
        "step": record.steps,
        "max_steps": record.planned or record.steps,
        "loss": told_last(Path(record.output_dir) / in_folder.METRICS, "loss"),
        "reason": record.reason,
        "eval_loss": record.eval_loss,
        "peers": [],
        "output_dir": record.output_dir,
        "prompt": record.prompt,
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
    if found.get("need"):
        yield rung_text(found["rung"], found["need"])
    extensions = everyone()
    for one in extensions:
        yield from one.above_peers(found)
    if found.get("reach"):
        yield f"reach: {found['reach']}"
    if in_full:
        yield from table(ALL, map(all_of, found["peers"]), width)
    else:
        yield from table(BRIEF, map(brief, [*found["peers"], *found.get("others", ())]))
    if (more := peers_of(found) - len(found["peers"])) > 0:
        yield f"and {more:,} more peers"
    for one in extensions:
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


COLUMNS = {"RUN": "<", "STATE": "<", "STEP": ">", "MODEL": "<", "AGE": ">", "FOLDER": "<"}
SECRETS = ("url", "keys")
TAIL = 1 << 16  # bytes of metrics.jsonl that hold the last step


def runs(as_json: Json = False, quiet: Quiet = False) -> None:
    """List the runs of this machine, the newest first.

    A run that was killed is shown as died: `cocktail resume RUN` continues it. Nothing is removed.

    Example: cocktail runs

    With --json one object: runs, each with run, state, step, planned, model, age_s, output_dir, recipe,
    started, and the other fields of its run.json but for the secrets.
    """
    found = [described(record) for record in sorted(known_runs(), key=lambda r: r.started, reverse=True)]
    if as_json:
        say_json({"runs": found})
    elif quiet:
        say(*(run["run"] for run in found))
    else:
        say(*table(COLUMNS, map(cells, found)))
        if not found:
            say("No runs were launched on this machine yet. Next: cocktail launch smoke", err=True)


def described(record: RunRecord) -> dict[str, Any]:
    """Describe a run without its secrets: its record, its state now, how far it came, and its model."""
    known = {key: value for key, value in asdict(record).items() if key not in SECRETS}
    folder = Path(record.output_dir)
    began = datetime.fromisoformat(record.started)
    age = (datetime.now(UTC) - began.replace(tzinfo=began.tzinfo or UTC)).total_seconds()
    step = told_last(folder / in_folder.METRICS, "step") or 0  # run.json is written at the end
    now = {
        "state": record.state_now(),
        "step": max(record.steps, step),
        "model": model_of(folder / in_folder.RESOLVED),
        "age_s": round(max(0.0, age)),
    }
    return known | now


def cells(run: dict[str, Any]) -> list[str]:
    step = f"{run['step']}/{run['planned']}" if run["planned"] else str(run["step"])
    age = duration_text(run["age_s"]) if run["age_s"] < 48 * 3600 else f"{run['age_s'] / 86400:.0f} days"
    return [run["run"], run["state"], step, one_line(run["model"], 32), age, one_line(run["output_dir"])]


def told_last(metrics: Path, key: str) -> Any:
    """Return the newest value of this key that a step in metrics.jsonl has; None where none has one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:  # no step was made, or the folder is being removed
        return None
    for line in reversed(lines):
        if b'"kind": "step"' in line and line.endswith(b"}"):
            with suppress(ValueError, TypeError, LookupError):  # a damaged line
                if (value := json.loads(line[line.index(b"{") :])[key]) is not None:
                    return value
    return None


def model_of(recipe: Path) -> str:
    """Return the model's name in a run's resolved recipe."""
    try:
        return str(parse_json(recipe.read_bytes())["model"]["model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):  # the folder is being removed, or was edited
        return "?"


def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the exchange in flight.")] = False,
    pause: Annotated[bool, flag("--pause", "Write no model: `resume` continues the run.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """End a run of this machine and write its model; or pause it.

    A paused run's peers store checkpoints, its launch ends, and `cocktail resume` continues it.

    Examples: cocktail stop amber-otter-42
    cocktail stop amber-otter-42 --pause

    With --json one object: run, was (its state), output_dir.
    """
    import transport

    record, rounds = load_run(run), 0
    if record.state == "running":
        with hub_of(record) as url:
            rounds = transport.ask_status(url, TIMEOUT)["round"]
            transport.ask_stop(url, record.keys["stop"], now, pause, TIMEOUT)
    if as_json:
        say_json({"run": record.run, "was": record.state, "output_dir": record.output_dir})
    elif quiet:
        say(record.run)
    elif record.state == "running" and pause:
        say(f"{record.run} is pausing. To continue it:", f"cocktail resume {record.run}")
    elif record.state == "running" and not rounds:
        say(f"{record.run} is ending before its first step, so there is no model")
    elif record.state == "running":
        say(f"{record.run} is ending; its model will be in {record.output_dir}")
    elif record.state == "paused":
        say(f"{record.run} is paused. To continue it:", f"cocktail resume {record.run}")
        say(f"Or make a model of it: cocktail export {record.run} -o DIR", err=True)
    else:
        say(f"{record.run} was over already ({record.state}); see {record.output_dir}")


LOOK_EVERY = 0.5  # seconds between two looks of --follow
# files of words, or of events, and what formats a line of each; None leaves it out
Sources = list[tuple[in_folder.GrowingFile, Callable[[str], str | None]]]
PEERS = "peers"  # folder of the local peers' files


def logs(
    run: RunArgument,
    peer: Annotated[
        str | None,
        argument(
            "PEER", "A local peer, such as local-1 (default: the hub).", local_peers, show_default=False
        ),
    ] = None,
    follow: Annotated[bool, flag("--follow -f", "Print new lines until the run is over.")] = False,
    count: Annotated[int, value("--lines -n", "N", "Print the last N lines first.", min=0)] = 50,
    as_json: Json = False,
) -> None:
    """Print what a run says: its last lines, and with -f the new ones.

    Examples: cocktail logs amber-otter-42 -f
    cocktail logs amber-otter-42 local-1 -n 200

    With --json each line is an event, as of `launch --json`.
    """
    record = load_run(run)
    logs_of = sources(record, peer, as_json)
    shown = [*new_lines(logs_of)]
    say(*shown[max(0, len(shown) - count) :])
    with suppress(KeyboardInterrupt):
        while follow:
            over = reread_run(record).state_now() != "running"
            say(*new_lines(logs_of))
            if over:  # asked before the files were read, so nothing is missed
                return
            time.sleep(LOOK_EVERY)


def new_lines(logs_of: Sources) -> Iterator[str]:
    for file, words in logs_of:
        yield from (said for said in map(words, file.new_lines()) if said is not None)


def sources(record: RunRecord, peer: str | None, as_json: bool) -> Sources:
    """Return the files of the hub or of a local peer. Raises Failure (usage) for a peer that has none."""
    folder, growing = Path(record.output_dir), in_folder.GrowingFile
    if peer is None:
        events_log, words_log = folder / in_folder.EVENTS, folder / in_folder.LOG
        return [(growing(events_log), str) if as_json else (growing(words_log), log_words)]
    names = sorted(path.stem for path in (folder / PEERS).glob("*.jsonl"))
    if peer not in names:
        near = get_close_matches(peer, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"local peers: {', '.join(names) or 'none'}"
        raise Failure("usage", f"{record.run} has no log of a peer {peer}", hints=(hint,))
    told, said = growing(folder / PEERS / f"{peer}.jsonl"), growing(folder / PEERS / f"{peer}.log")
    return [(told, str)] if as_json else [(told, event_words), (said, str)]


def log_words(line: str) -> str:
    """Leave out the name of the logger that has what the terminal shows."""
    return line.replace(f" INFO {in_folder.TOLD}:", "", 1)


def event_words(line: str) -> str | None:
    """Format a line of NDJSON as launch prints it: time and sentence. None for events without words."""
    try:
        told: Any = parse_json(line)
        if "error" in told:
            return f"error: {told['error']['message']}"
        event = from_json(told)
        said = event.state if isinstance(event, Progressed) else sentence(event)
        said = step_line(event, 0) if isinstance(event, events.Step) else said
        return f"{told['t']} {said}" if said else None
    except (ValueError, TypeError, LookupError, AttributeError) as error:  # cut by a kill, or damaged
        return f"a line that is no event: {error}"
