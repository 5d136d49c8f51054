"""Diagnosis of slow rounds: which peer lengthens them, why, and what helps. No clock, no I/O."""

from .causes import Cause, Culprit
from .round_sample import PeerSample, RoundSample
from .slow_rounds import HUB, SlowRounds
