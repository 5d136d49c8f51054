"""Connects the machines of a replica; loaded by `join --ring`, `join --layers` and `stage` alone."""

from .ring_lines import ANYWHERE, PATIENCE, RingDissolved, RingLines, StageRing, ring_of
