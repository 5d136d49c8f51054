"""The command line with real processes: launch, look, join, leave, stop, export, generate."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from in_this_process import Run

from cocktail_cli.machine import home, load_run, own_keys

COCKTAIL = [sys.executable, "-m", "cocktail_cli"]
LAUNCH = [
    "launch",
    "smoke",
    "--port",
    "0",
    "--bind",
    "127.0.0.1",
    "--json",
    "data.max_length=32",
    "data.val_set_size=4",
    "global_batch_size=8",
    "-o",
    "out",
]
PATIENCE = 180.0  # seconds for anything to happen on a busy machine

pytestmark = pytest.mark.slow


class Process:
    """A command of ours that runs, and what it tells with --json."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: list[dict[str, Any]] = []

    def until(self, event: str, **wanted: Any) -> dict[str, Any]:
        """Read on to an event of this name with these fields. The test's own time limit is the deadline."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.told.append(json.loads(line))
            last = self.told[-1]
            if last.get("event") == event and all(last[key] == value for key, value in wanted.items()):
                return last
        raise AssertionError(
            f"ended with {self.process.wait()} and without {event} {wanted}: {self.told[-3:]}"
        )

    def wait(self) -> int:
        """Read the rest; the exit status."""
        assert self.process.stdout is not None
        self.told += [json.loads(line) for line in self.process.stdout]
        return self.process.wait(PATIENCE)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [told for told in self.told if told.get("event") == name]


@contextmanager
def running(folder: Path, *arguments: str, stdin: str = "") -> Iterator[Process]:
    """Start a command in `folder`; it is killed at the end if it has not ended."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [*COCKTAIL, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / f"{arguments[0]}.err").open("w"),
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(stdin)
    process.stdin.close()
    try:
        yield Process(process)
    finally:
        process.kill()
        process.wait()


def words_of(process: Path) -> bytes:
    """The command line of a process, as all users of a Linux machine can read it."""
    try:
        return process.read_bytes()
    except OSError:  # it has ended
        return b""


def files_of(folder: Path) -> Iterator[Path]:
    """All but the two that hold secrets, for their user alone."""
    secret = {"run.json", "peer.json"}
    return (path for path in folder.rglob("*") if path.is_file() and path.name not in secret)


def secrets_of(run: str) -> dict[str, bytes]:
    """Collect what must appear nowhere else; of the token the part that the URL's checksum does not
    change.
    """
    keys = load_run(run).keys
    found = {
        "hub's key": keys["secret"],
        "signing key": keys["signing"],
        "owner's secret": keys["stop"],
        "token": keys["token"][:21],
    }
    return {what: text.encode() for what, text in (found | {"peer": own_keys().secret}).items()}


def asked(cocktail: Run, *arguments: str) -> dict[str, Any]:
    """The object of a short command with --json that succeeds."""
    said = cocktail(*arguments, "--json")
    assert said.exit == 0, said
    return dict(json.loads(said.out))


def test_a_run_is_launched_watched_stopped_exported_and_asked_to_write(tmp_path: Path, cocktail: Run) -> None:
    with running(tmp_path, *LAUNCH, "max_steps=5000", "--peers", "1") as launch:
        started = launch.until("run_started")
        launch.until("step", step=3)
        arguments = b"".join(map(words_of, Path("/proc").glob("[0-9]*/cmdline")))

        status = asked(cocktail, "status", started["url"])
        assert (status["run"], status["state"]) == (started["run"], "running")
        assert [peer["name"] for peer in status["peers"]] == ["local-1"]
        assert asked(cocktail, "status")["run"] == asked(cocktail, "runs")["runs"][0]["run"] == started["run"]
        early = asked(cocktail, "export", started["run"], "-o", "early")
        assert early["rounds"] >= 3
        assert asked(cocktail, "verify", "early", "--run", started["run"])["replayed"], "while it goes on"
        assert asked(cocktail, "stop", started["run"])["was"] == "running"
        assert launch.wait() == 0

    finished = launch.told[-1]
    assert (finished["event"], finished["model"]) == ("run_finished", "out")
    steps = launch.events("step")
    assert all(step["up_bytes"]["local-1"] > 0 and step["fingerprint"] for step in steps)
    again = asked(cocktail, "export", started["run"], "-o", "again")
    assert again["rounds"] == len(steps)
    sealed = asked(cocktail, "verify", "out")
    [receipt] = (home() / "receipts").iterdir()
    held = asked(cocktail, "verify", str(receipt), "--run", started["run"])
    assert (sealed["rounds"], held["samples"], held["in_ledger"]) == (len(steps), sealed["samples"], True)
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file
    assert asked(cocktail, "generate", "out", "The import", "--max-new-tokens", "4")["prompt"] == "The import"
    assert asked(cocktail, "status", started["run"])["state"] == "stopped"
    written = {path: path.read_bytes() for folder in (tmp_path, home()) for path in files_of(folder)}
    written[Path("ps")] = arguments
    written[Path("stdout")] = json.dumps([e for e in launch.told if e is not started]).encode()
    for what, secret in secrets_of(started["run"]).items():
        assert not [path for path, text in written.items() if secret in text], what
    second = cocktail(*LAUNCH)
    assert (second.exit, json.loads(second.out)["error"]["code"]) == (4, "output_in_use")
