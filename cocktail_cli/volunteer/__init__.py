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
from .base_weights import folder_of, room, to_fetch
from .bootstrap import micro_batch_of
from .join_prompt import read_url
from .limits import Resources, VolunteerLimits, lacking, requirements_column
from .session import VolunteerSession

if TYPE_CHECKING:
    from .loopback_link import Mirror

__all__ = [
    "Availability",
    "AvailabilityMonitor",
    "DailyHours",
    "Mirror",
    "Resources",
    "VolunteerLimits",
    "VolunteerSession",
    "folder_of",
    "lacking",
    "micro_batch_of",
    "next_at",
    "parse_hours",
    "parse_time",
    "read_url",
    "requirements_column",
    "room",
    "take_turns",
    "to_fetch",
]


def __getattr__(name: str) -> Any:
    """Import Mirror at first use: it brings in transport and ZeroMQ, and `cocktail --help` must be fast."""
    if name != "Mirror":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".loopback_link", __name__).Mirror
