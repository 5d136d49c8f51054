"""Bad input ends with its exit code and one clear error: what was met, and what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from in_this_process import Run
from test_run_registry import record

from cocktail_cli.machine.run_registry import save_run
from transport import RunKeys

ROWS = "".join(json.dumps({"text": f"row {i} of many more rows"}) + "\n" for i in range(20))
RECIPE = """version: 1
name: mine
model: {model_name_or_path: builtin:tiny-gpt-neox}
datasets: [{path: rows.jsonl}]
data: {max_length: 64}
"""
URL = str(RunKeys.generate().url("127.0.0.1", 1, "amber-otter-42"))
AGAIN = "ask the run's host for it again"


@dataclass(frozen=True)
class Bad:
    """A command with bad input, its exit code, and words of the cause and of the remedy."""

    typed: str
    exit: int
    cause: str
    remedy: str


COMMAND_LINES = [
    Bad("lauch smoke", 2, "No such command 'lauch'", "Did you mean 'launch'?"),
    Bad("bench compess", 2, "No such command 'compess'", "Did you mean 'compress'?"),
    Bad("launch smoke --pers 2", 2, "no such option: --pers", "did you mean --peers?"),
    Bad("status --pees", 2, "No such option: --pees", "--peers"),
    Bad("launch smoke --peers two", 2, "'--peers': it should be a valid integer", "cocktail launch --help"),
    Bad("launch smoke --peers -1", 2, "greater than or equal to 0", "cocktail launch --help"),
    Bad("launch smoke --port 99999", 2, "'--port': it should be less than or equal to 65535", "--help"),
    Bad("launch smoke --progress fancy", 2, "'--progress': 'fancy' is not one of 'auto', 'rich'", "--help"),
    Bad("launch smoke --max-up -5mbit", 2, "'-5mbit' is not a rate", "write 20mbit, 500kbit or 2MB/s"),
    Bad("launch smoke --max-up nan", 2, "'nan' is not a rate", "write 20mbit"),
    Bad("launch smoke --max-down 0", 2, "'0' is not a rate", "write 20mbit"),
    Bad("launch smoke --vram-limit -1GiB", 2, "'-1GiB' is not a size", "write 24GiB"),
    Bad("join x --hours 25:00-26:00", 2, "'25:00' is no time of day", "write 08:00"),
    Bad("launch smoke --device gpu", 2, "--device gpu", "expected auto, cpu, mps"),
    Bad("launch smoke --device cuda:99", 4, "--device cuda:99: this machine has", "--device auto"),
    Bad("launch smoke learing_rate=1", 3, "learing_rate", "did you mean `training.learning_rate`?"),
    Bad("launch smoke max_steps", 3, "max_steps", "an override is written key=value"),
    Bad("launch smoke max_steps=abc", 3, "must be a whole number, not 'abc'", "recipes schema training"),
    Bad("launch smoke learning_rate=-1", 3, "must be above 0, not -1", "recipes schema training"),
    Bad("launch smoke learning_rate=nan", 3, "must be a number, not 'nan'", "recipes schema training"),
    Bad("launch smok", 3, "no recipe of this name", "did you mean `smoke`?"),
    Bad("launch mime.yaml", 3, "no such file", "did you mean mine.yaml?"),
    Bad("launch elsewhere/x.yaml", 3, "no such file", "cocktail recipes list"),
    Bad("resume amber-oter-42", 3, "no run 'amber-oter-42'", "did you mean amber-otter-42?"),
    Bad("logs nowhere", 3, "no run 'nowhere'", "cocktail runs"),
    Bad("resume folder", 3, "folder holds no run (no run.json)", "cocktail runs"),
    Bad("generate folder x", 3, "folder holds no model", "cocktail export RUN -o DIR"),
    Bad(
        "status amber-otter-42", 5, "the hub of amber-otter-42 (process 1)", "cocktail resume amber-otter-42"
    ),
    Bad("stop amber-otter-42", 5, "the hub of amber-otter-42 (process 1)", "cocktail resume amber-otter-42"),
    Bad(f"join -y {URL[:60]}", 2, "the run URL is incomplete", AGAIN),
    Bad(f"join -y {URL[:-3]}", 2, "the checksum in its token does not fit", AGAIN),
    Bad(f"join -y {URL.replace('-42', '-43')}", 2, "a character of it is wrong", AGAIN),
    Bad(f"join -y {URL.removeprefix('cocktail://')}", 2, "expected 'cocktail://'", AGAIN),
    Bad(f"join -y {URL.replace('cocktail', 'https', 1)}", 2, "expected 'cocktail://'", AGAIN),
    Bad(f"join -y {URL.replace(':1/', '/')}", 2, "not of the form host:port", AGAIN),
    Bad(f"status {URL[:70]}", 2, "the run URL is incomplete", AGAIN),
    Bad("join -y @nofile", 2, "no such file: nofile", "cocktail join @FILE"),
    Bad("join -y", 2, "which run? the URL is missing", "cocktail join cocktail://"),
]


@pytest.fixture(autouse=True)
def here(cocktail: Run, tmp_path: Path) -> None:
    """A folder with rows, a recipe and an empty folder; and a run whose hub was killed."""
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "folder").mkdir()
    url = str(RunKeys.generate().url("127.0.0.1", 1, "amber-otter-42"))
    save_run(record(tmp_path / "out"))
    killed = json.loads((tmp_path / "out" / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(
        json.dumps(killed | {"url": url, "port": 1, "bind": "127.0.0.1"})
    )


@pytest.mark.parametrize("bad", COMMAND_LINES, ids=lambda bad: bad.cause)
def test_a_bad_command_line_ends_with_cause_and_remedy(cocktail: Run, bad: Bad) -> None:
    said = cocktail(*bad.typed.split())

    assert said.exit == bad.exit
    assert bad.cause in said.err
    assert bad.remedy in said.err
    assert said.err.count("error: ") == 1


FILES = {  # data: bytes of the file, cause, remedy
    "empty.jsonl": (b"", "empty.jsonl: the data set is empty", "it needs rows"),
    "blank.jsonl": (b"\n \n\n", "the data set is empty", "it needs rows"),
    "cut.jsonl": (ROWS.encode() + b'{"text": "cut\n', "cut.jsonl:21: not valid JSON", "correct this line"),
    "utf16.jsonl": (ROWS.encode("utf-16"), "utf16.jsonl:1: not UTF-8 text", "save the file as UTF-8"),
    "latin.jsonl": ('{"text": "café"}\n'.encode("latin-1"), "not UTF-8 text", "save the file as UTF-8"),
    "lists.jsonl": (b"[1]\n[2]\n", "must be an object with named fields", ""),
    "rows.xyz": (b"row", "rows.xyz: unknown kind of file", ".jsonl, .json, .csv"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_of_data_ends_with_cause_and_remedy(cocktail: Run, tmp_path: Path, name: str) -> None:
    content, cause, remedy = FILES[name]
    (tmp_path / name).write_bytes(content)
    said = cocktail("validate", "mine.yaml", "--data", name)

    assert (said.exit, cause in said.out, remedy in said.out) == (3, True, True), said.out


@pytest.mark.parametrize(
    ("path", "cause", "remedy"),
    [
        ("row.jsonl", "row.jsonl: no such file or folder", "did you mean rows.jsonl?"),
        ("far/away.jsonl", "no such file or folder", "check the path"),
        ("folder", "folder: cannot be loaded", "it may hold files of .jsonl"),
    ],
)
def test_data_that_are_not_there_end_with_cause_and_remedy(
    cocktail: Run, path: str, cause: str, remedy: str
) -> None:
    said = cocktail("validate", "mine.yaml", "--data", path)

    assert (said.exit, cause in said.out, remedy in said.out) == (3, True, True), said.out


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf" + ROWS.encode(), ROWS.replace("\n", "\r\n").encode()])
@pytest.mark.parametrize("recipe", [b"\xef\xbb\xbf" + RECIPE.encode(), RECIPE.replace("\n", "\r\n").encode()])
def test_byte_order_marks_and_windows_lines_are_no_errors(
    cocktail: Run, tmp_path: Path, data: bytes, recipe: bytes
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(data)
    (tmp_path / "mine.yaml").write_bytes(recipe)

    assert cocktail("validate", "mine.yaml").exit == 0


@pytest.mark.parametrize(
    ("content", "cause", "remedy"),
    [
        (b"", "the file is empty", "cocktail recipes copy smoke"),
        (b"- a\n", "a recipe is a mapping of keys to values", "cocktail recipes copy smoke"),
        (b"version: 1\n\tname: x\n", "not valid YAML", "indent with spaces"),
        (RECIPE.encode("utf-16"), "not UTF-8 text", "save the file as UTF-8"),
        (RECIPE.encode() + b"training: {learing_rate: 1}\n", "learing_rate", "did you mean `learning_rate`?"),
    ],
    ids=["empty", "list", "tab", "UTF-16", "misspelt key"],
)
def test_a_bad_recipe_ends_with_cause_and_remedy(
    cocktail: Run, tmp_path: Path, content: bytes, cause: str, remedy: str
) -> None:
    (tmp_path / "bad.yaml").write_bytes(content)
    said = cocktail("validate", "bad.yaml")

    assert (said.exit, cause in said.err, remedy in said.err) == (3, True, True), said.err
