"""The package as users get it: not the checkout, but the wheel built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PARTS = ("pyproject.toml", "README.md", "cocktail_cli", "compress", "recipes", "transport")
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.mark.slow
def test_the_wheel_holds_what_is_no_python_too(root: Path, tmp_path: Path) -> None:
    """Built from a copy: setuptools leaves its traces where it builds."""
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    wheels.mkdir()
    for part in PARTS:
        if (root / part).is_dir():
            shutil.copytree(root / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(root / part, source / part)
    subprocess.run([sys.executable, "-c", BUILD, str(wheels)], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("cocktail_sgd-*.whl")

    names = set(zipfile.ZipFile(wheel).namelist())

    shipped = [
        path.relative_to(root).as_posix()
        for room in PARTS[2:]
        for path in (root / room).rglob("*")
        if path.is_file()
        and path.suffix in (".py", ".yaml", ".json", ".jinja", ".css", ".js", ".svg")
        and not path.name.startswith(("quality-", "terminal"))  # pictures of documents
        and "__pycache__" not in path.parts
    ]
    assert "recipes/library/smoke.yaml" in names
    assert sorted(set(shipped) - names) == []
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"cocktail_cli", "compress", "recipes", "transport"}
