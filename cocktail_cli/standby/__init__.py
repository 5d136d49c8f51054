"""A machine that stands by for a run's hub, and takes over when that is lost."""

from .standby_session import StandbySession, StandbySettings, ask_take_over
