"""The command line without a process of its own: importing torch once is enough."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cocktail_cli.main import main


@dataclass(frozen=True)
class Said:
    """Output and exit status of a command."""

    exit: int
    out: str
    err: str


Run = Callable[..., Said]  # run("status", "--json")


@pytest.fixture
def cocktail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in the test's own empty folder; it must not end with a traceback."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["cocktail", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return Said(ended.value.code if isinstance(ended.value.code, int) else 1, said.out, said.err)

    return run
