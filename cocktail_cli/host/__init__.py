"""The process that hosts a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .detached import Parting, start
from .host_session import BIND, PORT, Listen, Run
from .local_peers import OWN_GROUP, LocalSettings, hold_life_line
from .resume_run import as_begun, place_of, unfinished
from .run_folder import log_to

if TYPE_CHECKING:
    from .hub_delegate import versions
    from .snapshot_thread import Place

__all__ = [
    "BIND",
    "OWN_GROUP",
    "PORT",
    "Listen",
    "LocalSettings",
    "Parting",
    "Place",
    "Run",
    "as_begun",
    "hold_life_line",
    "log_to",
    "place_of",
    "start",
    "unfinished",
    "versions",
]

# Imported at first use, as these bring in transport and ZeroMQ: `cocktail --help` must be fast.
_LAZY = {"versions": ".hub_delegate", "Place": ".snapshot_thread"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
