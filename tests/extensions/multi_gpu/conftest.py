"""Fixtures of runs in this process."""

from traced_once import traces_are_shared  # noqa: F401
from unhurried import unhurried  # noqa: F401
