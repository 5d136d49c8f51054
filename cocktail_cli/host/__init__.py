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
    ".durable_aggregator": "DurableAggregator LEAST_LOG rejections",
    ".run_delegate": "RunDelegate rungs_of settings_of versions",
    ".snapshot_thread": "CARD WEIGHTS CommittedModel ProgressHook replayed",
}

if not TYPE_CHECKING:  # a type checker must not accept any name

    def __getattr__(name: str) -> Any:
        """Import at first use what brings in transport and ZeroMQ: `cocktail --help` must be fast."""
        for module, names in _LAZY.items():
            if name in names.split():
                return getattr(import_module(module, __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
