"""The machines of a replica that several of them are; no other run loads it."""

from .ring_lines import RingLines, StageRing, ring_of
