"""Peers of a run: admission, sessions, liveness."""

from .admission import KEY_TRANSITIONS, STRIKES, Admission, KeyEvent, Standing, Visitor
from .roster import (
    AWAKE_S,
    FULL,
    SESSION_TRANSITIONS,
    Roster,
    Session,
    SessionEvent,
    State,
    Traffic,
    TrafficDelta,
    differences,
    refusal,
    same,
    wrong_run,
    wrong_token,
    wrong_version,
)
