"""Fixtures of runs in this process."""

from even_shares import even_shares  # noqa: F401
from traced_once import traces_are_shared  # noqa: F401
