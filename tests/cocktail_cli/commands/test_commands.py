"""Commands from the outside: what is wrong is one clear error with its exit code, and no traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from in_this_process import Run
from lying_host import lying_host

from cocktail_cli.host import run_folder
from transport import RunKeys


def recipe(folder: Path, text: str = "", data: str = "rows.jsonl") -> str:
    (folder / "my.yaml").write_text(
        "version: 1\nname: mine\nmodel: {model_name_or_path: 'builtin:tiny-gpt-neox'}\n"
        f"datasets: [{{path: {data}}}]\ndata: {{max_length: 64}}\n{text}"
    )
    return "my.yaml"


def test_recipes_can_be_listed_shown_and_copied(cocktail: Run, tmp_path: Path) -> None:
    assert "smoke" in cocktail("recipes", "list").out
    first = json.loads(cocktail("recipes", "list", "--json").out)["recipes"][0]["name"]
    assert cocktail("recipes", "list", "-q").out.split()[:2] == [first, "smoke"] == ["finetune", "smoke"]
    assert cocktail("recipes", "show", "smoke").out.startswith("# smoke.yaml")
    assert "logging_steps: 1" in cocktail("recipes", "show", "smoke", "--resolved").out
    assert cocktail("recipes", "copy", "smoke", "own.yaml").exit == 0
    assert (tmp_path / "own.yaml").read_text() == cocktail("recipes", "show", "smoke").out
    again = cocktail("recipes", "copy", "smoke", "own.yaml")
    assert (again.exit, "exists already" in again.err) == (2, True)


def test_the_list_of_recipes_breaks_no_word_at_80_columns(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wide = cocktail("recipes", "list", "--fits", "--device", "cpu").out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = cocktail("recipes", "list", "--fits", "--device", "cpu").out

    assert max(map(len, narrow.splitlines())) <= 80
    assert set(wide.split()) - {"HERE", "DESCRIPTION"} == set(narrow.split()) - {"here:"}


def test_memory_of_the_processor_is_no_memory_of_a_gpu(cocktail: Run) -> None:
    rows = json.loads(cocktail("recipes", "list", "--fits", "--device", "cpu", "--json").out)["recipes"]
    here = {row["name"]: row["here"] for row in rows}

    assert (here["smoke"], here["llama-3.1-8b-lora"]) == ("fits", "needs a GPU")


def test_every_key_of_a_recipe_is_printed_with_its_default_type_and_meaning(cocktail: Run) -> None:
    every = cocktail("recipes", "schema").out.splitlines()
    [rate] = cocktail("recipes", "schema", "learning_rate").out.splitlines()
    told = {line.split()[0] for line in every}

    typed, meaning = "number, above 0, below 1", "peak learning rate of the swarm"
    assert rate.split(maxsplit=2) == ["training.learning_rate", "2e-05", f"{typed}  # {meaning}"]
    assert {"datasets.0.path", "swarm.requires.vram", "lora.lora_r", "eval_datasets"} <= told
    assert len(told) == len(every)
    [optim] = cocktail("recipes", "schema", "training.optim").out.splitlines()
    assert "| sgd | muon | soap  # " in optim
    assert cocktail("recipes", "schema", "quant_bits").out.endswith("# q: bits of a sent value\n")
    section = json.loads(cocktail("recipes", "schema", "datasets", "--json").out)
    assert section["properties"]["split"]["default"] == "train"


def test_the_error_of_an_unknown_schema_field_names_the_nearest_one(cocktail: Run) -> None:
    for wrong in ("learing_rate", "training.learing_rate"):
        said = cocktail("recipes", "schema", wrong)
        assert (said.exit, "learning_rate`?" in said.err) == (3, True)


@pytest.mark.parametrize("command", ["launch", "join", "status", "stop", "peers", "preview", "export"])
def test_every_command_accepts_verbose_and_no_color(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "")

    assert cocktail(command, "--no-color", "-v", "--help").exit == 0
    assert os.environ["NO_COLOR"] == "1"


def test_the_error_of_a_misspelt_recipe_names_the_nearest_one(cocktail: Run) -> None:
    said = cocktail("launch", "smokke")

    assert said.exit == 3
    assert "did you mean `smoke`?" in said.err


def test_a_malformed_recipe_is_an_error_with_its_line(cocktail: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\nname: [unclosed\n")
    said = cocktail("launch", "bad.yaml")

    assert said.exit == 3
    assert said.err.startswith("error: bad.yaml has 1 problem")
    assert "bad.yaml:" in said.err


def test_an_unknown_key_is_an_error_with_line_and_hint(cocktail: Run, tmp_path: Path) -> None:
    said = cocktail("launch", recipe(tmp_path, "training: {learing_rate: 1.0e-4}\n"))

    assert said.exit == 3
    assert "my.yaml:6" in said.err
    assert "learning_rate" in said.err
    assert said.err.endswith("hint: its keys: cocktail recipes schema training\n")


def test_an_unknown_override_is_exit_3(cocktail: Run) -> None:
    assert cocktail("launch", "smoke", "learing_rate=1").exit == 3


def test_errors_are_json_with_json(cocktail: Run, tmp_path: Path) -> None:
    said = cocktail("launch", recipe(tmp_path, "training: {learing_rate: 1.0e-4}\n"), "--json")

    error = json.loads(said.out)["error"]
    assert (said.exit, error["exit"], error["code"]) == (3, 3, "recipe_invalid")
    assert error["problems"][0]["line"] == 6


def test_a_usage_error_is_exit_2_also_as_json(cocktail: Run) -> None:
    assert cocktail("launch").exit == 2
    said = cocktail("launch", "--json")
    assert (said.exit, json.loads(said.out)["error"]["code"]) == (2, "usage")


def test_a_missing_model_folder_is_exit_3(cocktail: Run) -> None:
    said = cocktail("launch", "smoke", "--model", "./nowhere")

    assert said.exit == 3
    assert "nowhere" in said.err


def test_an_empty_data_set_is_exit_3(cocktail: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    said = cocktail("launch", recipe(tmp_path))

    assert said.exit == 3
    assert "rows.jsonl" in said.err


def test_a_broken_line_of_data_is_an_error_with_file_and_line(cocktail: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c d e f"}\n{"text": \n')
    said = cocktail("launch", recipe(tmp_path))

    assert said.exit == 3
    assert "rows.jsonl:2" in said.err


def test_a_port_in_use_is_exit_4(cocktail: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c d e f"}\n' * 9)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = cocktail("launch", recipe(tmp_path), "--bind", "127.0.0.1", "--port", str(port))

    assert said.exit == 4
    assert str(port) in said.err


def test_launch_refuses_an_output_folder_with_other_files(cocktail: Run, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "thesis.tex").write_text("years of work")
    said = cocktail("launch", "smoke", "-o", "outputs")

    assert said.exit == 4
    assert "thesis.tex" in said.err
    assert (tmp_path / "outputs" / "thesis.tex").read_text() == "years of work"


def test_the_folder_of_a_launch_that_failed_early_is_used_again(tmp_path: Path) -> None:
    run_folder.claim(tmp_path / "out", "hash")
    (tmp_path / "out" / "cocktail.log").write_text("failed")

    run_folder.claim(tmp_path / "out", "hash")


@pytest.mark.parametrize("cut", [5, 40, 60, 80, 110])
def test_a_truncated_url_is_exit_2_and_says_so(cocktail: Run, cut: int) -> None:
    url = str(RunKeys.generate().url("203.0.113.7", 29400, "amber-otter-42"))
    said = cocktail("join", url[:cut], "-y")

    assert said.exit == 2
    assert "incomplete" in said.err


def test_joining_without_a_url_or_a_terminal_is_a_usage_error(cocktail: Run) -> None:
    assert cocktail("join", "-y").exit == 2
    url = str(RunKeys.generate().url("203.0.113.7", 29400, "amber-otter-42"))
    said = cocktail("join", url)
    assert (said.exit, "-y" in said.err) == (2, True)


@pytest.mark.slow
def test_an_unreachable_hub_is_exit_5(cocktail: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    url = str(RunKeys.generate().url("127.0.0.1", port, "amber-otter-42"))

    assert cocktail("status", url).exit == 5
    said = cocktail("join", url, "-y", "--device", "cpu")
    assert said.exit == 5
    assert f"127.0.0.1:{port}" in said.err


def test_join_refuses_a_missing_device(cocktail: Run) -> None:
    with lying_host() as hub:
        assert cocktail("join", hub.url, "-y", "--device", "cuda:99").exit == 4
        assert cocktail("join", hub.url, "-y", "--device", "abacus").exit == 2


def test_an_unknown_run_is_exit_3(cocktail: Run) -> None:
    for command in (["stop"], ["status"], ["export", "-o", "out"], ["generate"]):
        said = cocktail(command[0], "amber-oter-42", *command[1:])
        assert (said.exit, "no run" in said.err) == (3, True), command


@pytest.mark.slow
def test_stderr_has_the_error_and_nothing_else(root: Path, tmp_path: Path) -> None:
    """A process of its own, as here pytest stands between logging and stderr."""
    command = [sys.executable, "-m", "cocktail_cli", "status", "amber-oter-42"]
    home = os.environ | {"COCKTAIL_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=root, env=home, capture_output=True, text=True, timeout=600)

    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: no run 'amber-oter-42' on this machine",
        "hint: cocktail runs lists those that were launched here",
    ]


def test_version_prints_the_version(cocktail: Run) -> None:
    said = cocktail("--version")

    assert (said.exit, said.out.split()[0]) == (0, "cocktail")
