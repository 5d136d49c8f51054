"""Packages that the project needs with all of its extensions."""

from __future__ import annotations

import tomllib

from house import ROOT
from test_wheel import imported_in, named


def test_every_declared_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert {named(line) for line in project["dependencies"]} - imported_in(ROOT) == set()
