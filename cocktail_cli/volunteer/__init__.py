"""The process of a volunteer: prompt, bootstrap, session, link to the hub, availability."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .availability import (
    Availability,
    AvailabilityMonitor,
    DailyHours,
    next_at,
    parse_hours,
    parse_time,
    take_turns,
)
from .base_weights import base_folder, bytes_to_fetch, free_bytes
from .bootstrap import micro_batch_of
from .join_prompt import read_url
from .limits import Resources, VolunteerLimits, lacking, requirements_column
from .session import VolunteerSession

if TYPE_CHECKING:
    from .loopback_link import LoopbackLink


if not TYPE_CHECKING:  # a type checker must not accept any name

    def __getattr__(name: str) -> Any:
        """Import LoopbackLink at first use, as it brings in ZeroMQ: `cocktail --help` must be fast."""
        if name != "LoopbackLink":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(".loopback_link", __name__).LoopbackLink
