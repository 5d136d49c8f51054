"""Diagnosis of slow rounds: which peer lengthens them, and why; which line bounds them. No clock, no I/O."""

from .causes import Culprit
from .round_sample import PeerSample, RoundSample
from .sight import Moving, Sight
from .slow_rounds import HUB, SlowRounds
from .slowest_line import LineWatch, SlowestLine
