"""A tiny model and a few rows, for runs in this process."""

from in_process import data, neox  # noqa: F401
from traced_once import traces_are_shared  # noqa: F401
from unhurried import unhurried  # noqa: F401
