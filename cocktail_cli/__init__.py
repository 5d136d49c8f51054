"""Fine-tune a large language model with other people's GPUs: the command `cocktail`, and its Python API.

import cocktail_cli

for event in cocktail_cli.launch("smoke", peers=2):
    if isinstance(event, cocktail_cli.events.Step):
        print(event.step, event.loss)
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """Import the API at first use: every command imports this package, and starts fast without it."""
    if name == "Failure":
        return import_module(".errors", __name__).Failure
    folder = import_module(".assembly", __name__).api().get(name)
    if folder is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".extensions.{folder}", __name__), name)


def __dir__() -> list[str]:
    return [*globals(), "Failure", *import_module(".assembly", __name__).api()]
