"""Ceilings of the code that runs: functions and files that a round enters, and a join until its third step,
and the packages that such a run loads. They only fall.

Real processes are traced, all their threads: the hub, two peers, and a third one that joins
(walk_tracer.py). Each is a fork of one that has imported libraries, and nothing of ours. Two rounds in a row,
of a run that has been going for a while, are "a round".
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from forked import needs_fork
from house import EXTENSIONS

from scripts.swarms.forked import Forker
from scripts.swarms.processes import Process

COCKTAIL = (sys.executable, "-m", "cocktail_cli")
LAUNCH = "launch smoke --peers 2 --port 0 --bind 127.0.0.1 --json data.max_length=32 max_steps=4000 -o out"
SMALL = "global_batch_size=12 data.val_set_size=4"
BARE = "without=[proofs,diagnosis]"  # each other run signs receipts, and finds out who is slow
MOST = {"a round": (685, 71), "a join": (804, 83)}  # functions, files; a busy machine enters some 10, 2 more
LOADED = {  # packages of one capability that a run without it loads all the same
    "recipes/planning",
}

LIBRARIES = ("datasets", "peft", "zmq", "pydantic", "msgspec", "cryptography.x509", "typer.main")
LIBRARIES += ("transformers.models.gpt_neox.modeling_gpt_neox",)

pytestmark = [pytest.mark.slow, needs_fork]


@dataclass
class Walk:
    """What processes have entered and loaded."""

    functions: set[str]
    modules: set[str]

    @property
    def files(self) -> set[str]:
        return {function.split(":")[0] for function in self.functions}


@contextmanager
def started(forker: Forker, folder: Path, *arguments: str) -> Iterator[Process]:
    """Run a command in a folder, traced."""
    environment = {"WALK_TO": str(folder), "COCKTAIL_HOME": str(folder / "home")}
    fork = partial(forker.start, forks=True)
    process = Process([*COCKTAIL, *arguments], logs=folder / arguments[0], fork=fork, **environment)
    try:
        yield process
    finally:
        process.kill()


def written(folder: Path, processes: list[int]) -> Walk:
    """Ask processes what they have entered."""
    for process in processes:
        os.kill(process, signal.SIGUSR2)
    files = [folder / f"{process}.json" for process in processes]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    functions, modules = ({each for one in found for each in one[key]} for key in ("functions", "modules"))
    return Walk(functions, modules)


def a_round(folder: Path, launch: Process, processes: list[int]) -> Walk:
    """Trace two rounds."""
    for process in processes:
        os.kill(process, signal.SIGUSR1)
    launch.until("step", len(launch.heard("step")) + 2)
    return written(folder, processes)


def a_join(forker: Forker, folder: Path, url: str) -> Walk:
    """Trace a join until the third step: in its first rounds a peer may have nothing to compress."""
    with started(forker, folder, "join", url, "--yes", "--json") as join:
        join.until("step", 3)
        return written(folder, [join.pid])


def usual(walk: str, traced: Callable[[], Walk]) -> Walk:
    """Trace again, up to three times, what was more than its ceiling, and leave out what only some have
    entered: a peer that other load keeps from a round catches up, and the hub finds out why it is late."""
    found = traced()
    for _ in range(3):
        if not within(walk, found):
            again = traced()
            found = Walk(found.functions & again.functions, found.modules | again.modules)
    return found


def within(walk: str, found: Walk) -> bool:
    functions, files = MOST[walk]
    return len(found.functions) <= functions and len(found.files) <= files


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Walk]:
    """A round of a run with two peers, and a join of a third one."""
    folder = tmp_path_factory.mktemp("walk")
    with (
        Forker((*LIBRARIES, "tests.walk_tracer")) as forker,
        started(forker, folder, *LAUNCH.split(), *SMALL.split(), BARE) as launch,
    ):
        url = launch.until("run_started")["url"]
        launch.until("step", 6)  # the bandwidth was measured, deadlines are known
        local = [int(path.read_text().split()[0]) for path in (folder / "out" / "peers").glob("*.pid")]
        assert len(local) == 2
        return {
            "a round": usual("a round", lambda: a_round(folder, launch, [launch.pid, *local])),
            "a join": usual("a join", lambda: a_join(forker, folder, url)),
        }


@pytest.mark.parametrize("walk", MOST)
def test_what_is_entered_only_falls(walks: dict[str, Walk], walk: str) -> None:
    found = walks[walk]

    assert within(walk, found), f"{len(found.functions)} functions in {len(found.files)} files"


def test_capabilities_that_a_run_loads_without_using_them_only_get_fewer(walks: dict[str, Walk]) -> None:
    packages = {module.replace(".", "/") for walk in walks.values() for module in walk.modules}

    assert {name for name in packages if name in EXTENSIONS} == LOADED
    assert not any(name.startswith("cocktail_cli/extensions/") for name in packages)


def test_a_run_that_names_no_extension_loads_those_that_each_run_uses_and_no_other(tmp_path: Path) -> None:
    with (
        Forker((*LIBRARIES, "tests.walk_tracer")) as forker,
        started(forker, tmp_path, *LAUNCH.split(), *SMALL.split()) as launch,
    ):
        launch.until("step", 3)
        local = [int(path.read_text().split()[0]) for path in (tmp_path / "out" / "peers").glob("*.pid")]
        modules = written(tmp_path, [launch.pid, *local]).modules

    parts = [name.split(".") for name in modules if name.startswith("cocktail_cli.extensions.")]
    assert {folder for _, _, folder, *_ in parts} == {"diagnosis", "proofs"}
