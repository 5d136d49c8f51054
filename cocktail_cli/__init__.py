"""Fine-tune a large language model with other people's GPUs: the command `cocktail`, and its Python API.

import cocktail_cli

for event in cocktail_cli.launch("smoke", peers=2):
    if isinstance(event, cocktail_cli.events.Step):
        print(event.step, event.loss)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from .api import (
        Altered,
        ConnectionLost,
        InvalidInput,
        NoResult,
        OutOfResources,
        PreflightFailed,
        Rejected,
        Run,
        Unreachable,
        events,
        join,
        launch,
        resume,
    )
    from .errors import Failure

_API = (
    *("launch", "resume", "join", "Run", "events"),
    *("Altered", "ConnectionLost", "InvalidInput", "NoResult", "OutOfResources", "PreflightFailed"),
    *("Rejected", "Unreachable"),
)

if not TYPE_CHECKING:  # a type checker must not accept any name

    def __getattr__(name: str) -> Any:
        """Import the API at first use: every command imports this package, and starts fast without it."""
        if name == "Failure":
            return import_module(".errors", __name__).Failure
        if name not in _API:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".api", __name__), name)

    def __dir__() -> list[str]:
        return [*globals(), "Failure", *_API]
