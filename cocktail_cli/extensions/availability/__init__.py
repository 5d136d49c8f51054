"""When a volunteer's machine may work: by hours, heat, and who else uses its GPU."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cocktail_cli.assembly import Extension, Joining

from .availability_rules import Availability, AvailabilityMonitor, next_at, parse_hours, parse_time


class AvailabilityExtension(Extension):
    """Makes a volunteer leave, and come back, by its options."""

    def joining(self, options: Mapping[str, Any]) -> Joining | None:
        until = options.get("until")
        leave_at = next_at(until, datetime.now()) if until else None
        hours, only_idle, max_temp = map(options.get, ("hours", "only_idle", "max_temp"))
        return AvailabilityMonitor(Availability(hours, leave_at, bool(only_idle), max_temp))


extension = AvailabilityExtension()
