"""Connects the machines of a replica; loaded by `join --layers` alone."""

from .ring_lines import ANYWHERE, PATIENCE, RingDissolved, RingLines, StageRing
