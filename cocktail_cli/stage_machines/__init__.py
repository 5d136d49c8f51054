"""Connects the machines of a replica; loaded by `join --ring` and `stage` alone."""

from .ring_lines import RingLines, StageRing, ring_of
