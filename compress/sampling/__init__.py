"""The coordinates that a round visits, drawn from (seed, round) alone."""

from .coordinates import Sample, draw
from .schedule import Walk, places, walk

__all__ = [
    "Sample",
    "Walk",
    "draw",
    "places",
    "walk",
]
