"""The process of a volunteer: prompt, bootstrap, link to the hub, availability."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .availability import Watch, stays
from .base_weights import digest_of, folder_of, room, taken, to_fetch
from .bootstrap import Preparation, micro_batch_of
from .gpu_processes import Ranks
from .join_prompt import fitted, read_url, says_yes, screen
from .lending_terms import Lent, Terms
from .requirements import Has, check, lacking, needs
from .step_events import OwnSteps

if TYPE_CHECKING:
    from .loopback_link import Mirror
    from .run_link import RunLink
    from .shard_aggregator_link import half_of, open_door, to_owners

__all__ = [
    "Has",
    "Lent",
    "Mirror",
    "OwnSteps",
    "Preparation",
    "Ranks",
    "RunLink",
    "Terms",
    "Watch",
    "check",
    "digest_of",
    "fitted",
    "folder_of",
    "half_of",
    "lacking",
    "micro_batch_of",
    "needs",
    "open_door",
    "read_url",
    "room",
    "says_yes",
    "screen",
    "stays",
    "taken",
    "to_fetch",
    "to_owners",
]

# Imported at first use, as these bring in transport and ZeroMQ: `cocktail --help` must be fast.
_LAZY = {
    "Mirror": ".loopback_link",
    "RunLink": ".run_link",
    "half_of": ".shard_aggregator_link",
    "open_door": ".shard_aggregator_link",
    "to_owners": ".shard_aggregator_link",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
