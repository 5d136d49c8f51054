"""What a user sees: events, terminal views, metrics, trackers."""

from .board import (
    counted,
    megabytes,
    printable,
    short,
    sparkline,
    spell,
)
from .display import (
    Display,
    View,
    look_on,
    sentence,
    step_line,
    view_of,
)
from .events import (
    VERSION,
    Checkpoint,
    Event,
    Joined,
    Left,
    PageOpened,
    Progressed,
    Reached,
    RunFinished,
    RunPaused,
    RunStarted,
    Step,
    Warning,
    as_json,
    of_json,
    timestamp,
)
from .findings import tell
from .live_view import LiveView
from .metrics_lines import Line, Metrics, known_in, missed
from .progress_meter import Meter
from .trackers import FOLDER, Tracker, trackers_of

__all__ = [
    "FOLDER",
    "VERSION",
    "Checkpoint",
    "Display",
    "Event",
    "Joined",
    "Left",
    "Line",
    "LiveView",
    "Meter",
    "Metrics",
    "PageOpened",
    "Progressed",
    "Reached",
    "RunFinished",
    "RunPaused",
    "RunStarted",
    "Step",
    "Tracker",
    "View",
    "Warning",
    "as_json",
    "counted",
    "known_in",
    "look_on",
    "megabytes",
    "missed",
    "of_json",
    "printable",
    "sentence",
    "short",
    "sparkline",
    "spell",
    "step_line",
    "tell",
    "timestamp",
    "trackers_of",
    "view_of",
]
