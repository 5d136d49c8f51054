"""The user interface: events, terminal views, metrics lines, trackers."""

from . import events
from .display import Display, Progress, View, open_board, open_view, poll_status
from .events import Checkpoint, Event, PageOpened, Progressed, RunStarted, Warning, from_json, timestamp
from .findings import found, print_findings
from .metrics_lines import Line, Metrics, Named, held_out, missing_lines, read_written, step_numbers
from .output import Style, guarded_output, say, say_json, say_own, say_styled, say_text, table
from .progress_meter import ProgressMeter
from .text_chart import MARK, round_ticks, showable, text_chart
from .trackers import FOLDER, Tracker, trackers_of
from .wording import (
    counted,
    duration_text,
    layers_text,
    megabytes,
    sentence,
    short,
    stage_lines,
    step_line,
    time_left_text,
)
