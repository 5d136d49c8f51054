"""Peers of a run: admission, sessions, liveness."""

from .admission import NEXT, STRIKES, Act, Admission, Standing
from .roster import AWAKE_S, CATCHING_UP, Roster
from .sessions import (
    Kind,
    Session,
    State,
    differences,
    refusal,
    same,
    wrong_run,
    wrong_token,
    wrong_version,
)

__all__ = [
    "AWAKE_S",
    "CATCHING_UP",
    "NEXT",
    "STRIKES",
    "Act",
    "Admission",
    "Kind",
    "Roster",
    "Session",
    "Standing",
    "State",
    "differences",
    "refusal",
    "same",
    "wrong_run",
    "wrong_token",
    "wrong_version",
]
