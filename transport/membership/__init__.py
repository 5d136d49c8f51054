"""Peers of a run: admission, sessions, liveness."""

from .admission import KEY_TRANSITIONS, STRIKES, Admission, KeyEvent, Standing, Visitor
from .roster import AWAKE_S, FULL, Roster
from .sessions import (
    SESSION_TRANSITIONS,
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
