"""The border of the program: what it prints survives narrow encodings and readers who go away."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_this_process import Run

from cocktail_cli.main import OUTPUT_CLOSED, main

CHEAP = [["--help"], ["--version"], ["recipes", "list"], ["recipes", "list", "--json"], ["recipes", "schema"]]
CHEAP += [["launch", "--help"], ["recipes", "show", "smoke"]]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], out: io.TextIOWrapper) -> object:
    """Run a command whose stdout and stderr are `out`; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["cocktail", *arguments])
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize("arguments", CHEAP, ids=" ".join)
def test_a_command_whose_reader_is_gone_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """`cocktail recipes list | head -1` shows no traceback, whether or not all was written before."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        status = run(monkeypatch, arguments, out)

    assert status in (0, OUTPUT_CLOSED)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("arguments", CHEAP, ids=" ".join)
def test_output_survives_an_encoding_that_lacks_its_characters(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], encoding: str
) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding, write_through=True)

    assert run(monkeypatch, arguments, out) == 0
    assert written.getvalue()


def test_a_usage_error_names_the_help_that_lists_what_is_right(cocktail: Run) -> None:
    said = cocktail("lauch", "smoke")

    assert said.exit == 2
    assert said.err.splitlines() == [
        "error: No such command 'lauch'. Did you mean 'launch'?",
        "hint: cocktail --help",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, where nobody can make a folder")
@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/proc/foo/x", "cannot use /proc/foo/x: No such file or directory"),
        ("file", "file is a file"),
        ("file/x", "file/x: Not a directory"),
        ("n" * 300, "File name too long"),
    ],
)
def test_an_output_folder_that_cannot_be_made_is_exit_4_with_a_remedy(
    cocktail: Run, tmp_path: Path, folder: str, message: str
) -> None:
    (tmp_path / "file").write_text("")

    said = cocktail("launch", "smoke", "-o", folder)

    assert said.exit == 4
    assert message in said.err
    assert "hint: " in said.err


def test_a_command_ends_without_taking_its_modules_apart_but_with_their_functions_at_exit() -> None:
    program = """
import atexit, sys, time
from cocktail_cli import __main__ as entry, main

class Slow:
    def __del__(self):
        time.sleep(60)

def run(*arguments):
    atexit.register(print, "bye")
    inner(*arguments)

sys.slow, inner, main.run, sys.argv = Slow(), main.run, run, ["cocktail", "resume"]
entry.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)

    assert (ended.returncode, ended.stdout) == (2, "bye\n")
    assert ended.stderr.startswith("error: ")
