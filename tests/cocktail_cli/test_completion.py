"""TAB offers recipes, runs and keys, at once; and every command's help has an example."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processor_time import half_a_second, timed

from cocktail_cli.machine import RunRecord, save_run
from cocktail_cli.main import command_table
from cocktail_cli.options import local_peers, overrides, recipe_names, run_names, unfinished_runs


def commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


COMMANDS = dict(commands(command_table([])))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    assert f"cocktail {name} " in " ".join((COMMANDS[name].help or "").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_argument_says_what_it_does(name: str) -> None:
    silent = [
        p.name
        for p in COMMANDS[name].params
        if not getattr(p, "hidden", False) and not getattr(p, "help", "")
    ]

    assert silent == []


def test_recipes_are_offered_by_name_and_files_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")

    assert ("smoke", "shipped recipe") in recipe_names("")
    assert recipe_names("mi") == [("mine.yaml", "file")]
    assert recipe_names("/none/*[") == []


def test_runs_of_this_machine_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path / "home"))
    assert run_names("") == []

    out = str(tmp_path / "out")
    save_run(
        RunRecord("amber-otter-42", "u", {}, 1, 2, "b", out, "base", "smoke", "9f", "2026", state="finished")
    )

    assert run_names("am") == [("amber-otter-42", "finished, smoke")]
    assert run_names("x") == []
    assert unfinished_runs("") == [], "it is finished"


def test_local_peers_of_the_run_before_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path / "home"))
    out = tmp_path / "out"
    (out / "peers").mkdir(parents=True)
    (out / "peers" / "local-1.jsonl").write_text("")
    save_run(RunRecord("amber-otter-42", "u", {}, 1, 2, "b", str(out), "base", "smoke", "9f", "2026"))
    context: Any = SimpleNamespace(params={"run": "amber-otter-42"})

    assert local_peers(context, "") == [("local-1", "local peer")]
    assert local_peers(SimpleNamespace(params={"run": "none"}), "") == []  # type: ignore[arg-type]
    assert [name for name, _ in unfinished_runs("")] == ["amber-otter-42"]


def test_keys_are_offered_dotted_and_bare_and_their_choices_after_the_sign() -> None:
    assert [word for word, _ in overrides("learning_r")] == ["learning_rate="]
    assert ("training.learning_rate=", "field of the recipe") in overrides("training.l")
    assert ("compression.preset=diloco", "") in overrides("compression.preset=")
    assert [word for word, _ in overrides("packing=")] == ["packing=false", "packing=true"]
    assert overrides("nothing.like") == []


@pytest.mark.slow
def test_a_shell_is_answered_in_half_a_second() -> None:
    """Torch is not imported for it."""
    asked = {"_COCKTAIL_COMPLETE": "complete_bash", "COMP_WORDS": "cocktail launch smok", "COMP_CWORD": "2"}
    program = "import sys; sys.argv[0] = 'cocktail'; from cocktail_cli.main import main; main()"
    seconds, said = timed("-c", program, env=asked)

    assert said.split() == ["smoke"]
    assert seconds < half_a_second()
