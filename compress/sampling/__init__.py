"""The coordinates that a round visits, drawn from (seed, round) alone."""

from .schedule import Sample, Schedule, most_sampled, one_range, schedule
