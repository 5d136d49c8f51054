"""The user interface: events, terminal views, metrics lines, trackers."""

from .board import (
    counted,
    duration_text,
    megabytes,
    printable,
    short,
    sparkline,
)
from .display import (
    Display,
    Progress,
    View,
    open_view,
    poll_status,
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
    from_json,
    timestamp,
)
from .findings import found, print_findings
from .live_view import LiveView
from .metrics_lines import Line, Metrics, missing_lines, read_written
from .progress_meter import ProgressMeter
from .trackers import FOLDER, Tracker, trackers_of
from .wording import sentence, step_line

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
    "Metrics",
    "PageOpened",
    "Progress",
    "ProgressMeter",
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
    "duration_text",
    "found",
    "from_json",
    "megabytes",
    "missing_lines",
    "open_view",
    "poll_status",
    "print_findings",
    "printable",
    "read_written",
    "sentence",
    "short",
    "sparkline",
    "step_line",
    "timestamp",
    "trackers_of",
]
