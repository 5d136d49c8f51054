"""The scripts that are run by hand; README.md has the list."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def reach_tests(*folders: str) -> None:
    """Make the modules in these folders of tests/ importable: laws live there, scripts drive them."""
    paths = [str(ROOT / "tests" / folder) for folder in folders]
    sys.path += [path for path in paths if path not in sys.path]
