"""The fixture that runs a command in this process."""

from in_this_process import cocktail  # noqa: F401
