"""Fixtures of runs in this process."""

from unhurried import unhurried  # noqa: F401
