"""The fixture that runs a command in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from in_this_process import Run, Said
from traced_once import traces_are_shared  # noqa: F401

from cocktail_cli.main import main


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
