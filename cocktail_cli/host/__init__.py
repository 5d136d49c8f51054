"""The process that hosts a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import run_folder
from .host_session import HostSession, LaunchSettings, check_format, checked_recipe, hosted_before, launch_run
from .local_peers import LifeLine, LocalPeers, LocalSettings, read_events, start_command
from .run_folder import (
    COPY_AGAIN,
    altered_base_files,
    as_yaml,
    begun_files,
    check_begun_files,
    hashes_of,
    log_to,
    sha256_of,
)

if TYPE_CHECKING:
    from .durable_aggregator import LEAST_LOG, DurableAggregator, rejections
    from .run_delegate import RunDelegate, rungs_of, settings_of, versions
    from .snapshot_thread import CARD, WEIGHTS, CommittedModel, ProgressHook, replayed

_LAZY = {
    "DurableAggregator": ".durable_aggregator",
    "LEAST_LOG": ".durable_aggregator",
    "rejections": ".durable_aggregator",
    "versions": ".run_delegate",
    "RunDelegate": ".run_delegate",
    "rungs_of": ".run_delegate",
    "settings_of": ".run_delegate",
    "CommittedModel": ".snapshot_thread",
    "CARD": ".snapshot_thread",
    "WEIGHTS": ".snapshot_thread",
    "ProgressHook": ".snapshot_thread",
    "replayed": ".snapshot_thread",
}

if not TYPE_CHECKING:  # a type checker must not accept any name

    def __getattr__(name: str) -> Any:
        """Import at first use what brings in transport and ZeroMQ: `cocktail --help` must be fast."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name], __name__), name)
