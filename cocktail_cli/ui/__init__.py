"""The user interface: events, terminal views, metrics lines."""

from cocktail_cli.assembly import View

from . import events
from .display import Display, Progress, ProgressMeter, open_view, poll_status
from .events import Checkpoint, Event, Progressed, RunStarted, Warning, from_json, timestamp
from .metrics_lines import FP16, Baseline, Line, Metrics, Named, held_out, read_written, step_numbers
from .output import (
    GuardedStream,
    Style,
    found,
    guarded_output,
    print_findings,
    say,
    say_json,
    say_own,
    say_styled,
    say_text,
    table,
    unguarded,
)
from .text_chart import LEAST_ROWS, MARK, round_ticks, showable, text_chart
from .wording import (
    counted,
    duration_text,
    farewell,
    generate_command,
    invitation,
    megabytes,
    progress_text,
    rung_text,
    sentence,
    short,
    step_line,
    time_left_text,
)
