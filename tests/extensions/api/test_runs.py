"""`cocktail_cli.launch` and `join`: the words of the command line, and the ends that a run may have."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from forked import Forked, needs_fork
from waiting import until

import cocktail_cli
from cocktail_cli import assembly
from cocktail_cli.commands import join as join_command
from cocktail_cli.commands import launch as launch_command
from cocktail_cli.extensions.api.runs import TERMINAL, Feed, as_yaml_value, command_words, options_of
from cocktail_cli.machine import load_run
from recipes.config import load_recipe

NOBODY: dict[str, Any] = {"no_train": True, "port": 0, "bind": "127.0.0.1"}
NOBODY |= {"data.max_length": 32, "data.val_set_size": 4}


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import cocktail_cli, sys; print(sorted(m for m in sys.modules if m.startswith('cocktail_cli')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['cocktail_cli']"


def test_the_front_names_what_it_imports_at_first_use() -> None:
    for name in ("launch", "join", "Run", "events", "Failure", "NoResult", "Rejected"):
        assert name in dir(cocktail_cli)
        assert getattr(cocktail_cli, name) is not None


@pytest.mark.parametrize("command", [launch_command.launch, launch_command.resume, join_command.join])
def test_every_option_of_the_command_is_a_keyword_unless_it_is_for_the_terminal(command: Any) -> None:
    found, names = options_of(command), set(command.__annotations__) - {"return", "given"}
    names |= {option.parameter for _, option in assembly.options_of(command.__name__)}

    assert set(found) >= names - TERMINAL - {"recipe", "overrides", "run", "run_url"}
    assert "given" not in found
    assert all(option.startswith("--") for option in found.values())


def test_options_are_written_as_on_the_command_line(tmp_path: Path) -> None:
    known = options_of(launch_command.launch)
    given = {
        "output_dir": tmp_path,
        "peers": 0,
        "no_train": True,
        "fresh": False,
        "max_up": "5mbit",
        "gpus": None,
    }

    words = command_words("launch", known, given)

    assert words == ["--output-dir", str(tmp_path), "--peers", "0", "--no-train", "--max-up", "5mbit"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.learning_rate", 1e-5),
        ("training.max_steps", 20),
        ("description", "yes: no # 1"),
        ("description", 'ömer\'s "run"'),
        ("model.trust_remote_code", False),
        ("lora.lora_r", 4),
        ("datasets", [{"path": "rows.jsonl", "weight": 2.0}]),
    ],
)
def test_a_keys_value_reaches_the_recipe_as_it_is_in_python(key: str, value: object) -> None:
    found = load_recipe("smoke", [f"{key}={as_yaml_value(key, value)}"]).model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    if key == "datasets":
        found = [{"path": one["path"], "weight": one["weight"]} for one in found]

    assert found == value


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"quiet": True}, "is for the terminal"),
        ({"data": [{"text": "a"}]}, "data is a list; a run takes a path"),
        ({"seed": object()}, "seed is a object, which a recipe cannot hold"),
    ],
)
def test_an_argument_that_is_none_is_refused_before_anything_starts(
    keywords: dict[str, Any], said: str
) -> None:
    with pytest.raises(cocktail_cli.InvalidInput, match=said):
        cocktail_cli.launch("smoke", **keywords)


def test_a_misspelt_option_of_join_is_refused_with_the_nearest() -> None:
    with pytest.raises(cocktail_cli.InvalidInput, match="no option `devic`") as caught:
        cocktail_cli.join("cocktail://x", devic="cpu")

    assert caught.value.hints == ("did you mean `device`?",)


def test_an_option_that_is_gone_is_refused_with_what_does_its_work_now() -> None:
    with pytest.raises(cocktail_cli.InvalidInput, match="launch has no option `dry_run`") as caught:
        cocktail_cli.launch("smoke", dry_run=True)

    assert caught.value.hints == ("now it is cocktail validate RECIPE and cocktail plan RECIPE",)


# ---- with processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_block_that_does_not_read_its_run_ends_with_the_runs_failure() -> None:
    with (
        pytest.raises(cocktail_cli.InvalidInput, match="smok has 1 problem"),
        cocktail_cli.launch("smok") as run,
    ):
        run._process.wait()  # it failed by itself, before the block's end could stop it


def test_a_process_that_ends_while_it_is_asked_to_stop_ends_its_run(tmp_path: Path) -> None:
    """Its reader and who stops it both close its stdin, whose words cannot be flushed any more."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for _ in range(50):
        process = subprocess.Popen([sys.executable, "--version"], **pipes)
        feed = Feed(process, (tmp_path / "stderr").open("w+"))
        process.wait()

        feed.write("stopped from Python\n")
        feed.close_stdin()

        assert feed.events.get(timeout=30) is None
        assert feed.failure is not None


@pytest.mark.slow
def test_the_failure_of_the_command_is_raised_by_every_way_to_read_the_run() -> None:
    run = cocktail_cli.launch("smoke", learing_rate=1)

    for read in (lambda: run.url, run.result, lambda: run.model_dir):
        with pytest.raises(cocktail_cli.InvalidInput) as caught:
            read()
        assert "did you mean `training.learning_rate`" in caught.value.__notes__[0]


class PressesCtrlC:
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_starts")
def test_an_interrupt_or_an_error_of_a_callback_ends_the_run_in_good_order_before_it_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = list[cocktail_cli.Run]()
    keywords = NOBODY | {"output_dir": "out", "callbacks": [PressesCtrlC]}
    thread = threading.Thread(target=lambda: runs.append(cocktail_cli.launch("smoke", **keywords)))
    thread.start()  # a thread cannot install signal handlers
    thread.join()
    (run,) = runs
    assert run.url.startswith("cocktail://")
    with pytest.raises(KeyboardInterrupt):
        run.result()

    assert run._process.poll() is not None
    assert load_run("out").state == "stopped"
    log = (tmp_path / "out" / "events.jsonl").read_text()
    assert "ending (stopped from Python): finishing the exchange in flight" in log


HOST = """
import cocktail_cli, os
run = cocktail_cli.launch("smoke", output_dir="out", no_train=True, port=0, bind="127.0.0.1")
print(run.url, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@needs_fork
def test_a_run_pauses_when_its_program_is_killed(
    tmp_path: Path, forked: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(HOST)
    program = forked.start(
        tmp_path, module="program", before="import sys; sys.path.insert(0, '')", forks=True
    )
    assert program.process.wait(200) == -signal.SIGKILL, program.said
    assert (tmp_path / "told").read_text().startswith("cocktail://")
    until(lambda: load_run("out").state == "paused", 60)
    log = (tmp_path / "out" / "events.jsonl").read_text()
    assert "pausing (its launching process ended): finishing the exchange in flight" in log
