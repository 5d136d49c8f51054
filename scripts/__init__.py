"""The scripts that are run by hand; README.md has the list."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def reach_tests() -> None:
    """Make the modules of tests/ importable: laws live there, scripts drive them."""
    folders = sorted({str(path.parent) for path in (ROOT / "tests").rglob("*.py")})
    sys.path += [folder for folder in folders if folder not in sys.path]
