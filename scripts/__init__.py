"""The scripts that are run by hand; README.md has the list."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
