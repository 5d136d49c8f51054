"""The fixture that runs a command in this process."""

from in_this_process import cocktail  # noqa: F401
from traced_once import traces_are_shared  # noqa: F401
