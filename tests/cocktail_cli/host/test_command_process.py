"""A command in a process of its own is ours, whatever lies in the working folder."""

import os
import subprocess
from pathlib import Path

import pytest

import cocktail_cli
from cocktail_cli.host import start_command

HOUSE = Path(cocktail_cli.__file__).parent.parent


@pytest.mark.slow
def test_no_file_of_the_working_folder_shadows_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own random.py is imported by no peer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit('shadowed')\n")
    env = {**os.environ, "PYTHONPATH": str(HOUSE)}
    process = start_command(["--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)

    assert process.communicate(timeout=600)[0] == f"cocktail {cocktail_cli.__version__}\n"
