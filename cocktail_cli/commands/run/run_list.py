"""`cocktail runs`: the runs that were launched on this machine, finished ones too."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cocktail_cli.foreign_text import one_line
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import RunRecord, known_runs
from cocktail_cli.options import Json, Quiet
from cocktail_cli.ui import duration_text, say, say_json, table

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
        for run in found:
            say(run["run"])
    else:
        for line in table(COLUMNS, map(cells, found)):
            say(line)
        if not found:
            say("No runs were launched on this machine yet. Next: cocktail launch smoke", err=True)


def described(record: RunRecord) -> dict[str, Any]:
    """Describe a run without its secrets: its record, its state now, how far it came, and its model."""
    known = {key: value for key, value in asdict(record).items() if key not in SECRETS}
    folder = Path(record.output_dir)
    began = datetime.fromisoformat(record.started)
    age = (datetime.now(UTC) - began.replace(tzinfo=began.tzinfo or UTC)).total_seconds()
    now = {
        "state": record.state_now(),
        "step": max(record.steps, last_step(folder / in_folder.METRICS)),  # run.json is written at the end
        "model": model_of(folder / in_folder.RESOLVED),
        "age_s": round(max(0.0, age)),
    }
    return known | now


def cells(run: dict[str, Any]) -> list[str]:
    step = f"{run['step']}/{run['planned']}" if run["planned"] else str(run["step"])
    age = duration_text(run["age_s"]) if run["age_s"] < 48 * 3600 else f"{run['age_s'] / 86400:.0f} days"
    return [
        run["run"],
        run["state"],
        step,
        one_line(run["model"], 32),
        age,
        one_line(run["output_dir"]),
    ]


def last_step(metrics: Path) -> int:
    """Return the newest step that metrics.jsonl tells of; 0 where it tells of none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:  # no step was made, or the folder is being removed
        return 0
    for line in reversed(lines):
        if b'"kind": "step"' in line and line.endswith(b"}"):
            with suppress(ValueError, TypeError, LookupError):  # a damaged line
                return int(json.loads(line[line.index(b"{") :])["step"])
    return 0


def model_of(recipe: Path) -> str:
    """Return the model's name in a run's resolved recipe."""
    from recipes.foreign_json import parse_json

    try:
        return str(parse_json(recipe.read_bytes())["model"]["model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):  # the folder is being removed, or was edited
        return "?"
