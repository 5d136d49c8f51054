"""The commands `launch`, `resume` and `join` from Python: a run as an object that yields its events."""

from cocktail_cli.ui import events

from .errors import (
    Altered,
    ConnectionLost,
    InvalidInput,
    NoResult,
    OutOfResources,
    PreflightFailed,
    Rejected,
    Unreachable,
)
from .runs import CallbackReader, Run, RunControl, RunState, join, launch, resume
