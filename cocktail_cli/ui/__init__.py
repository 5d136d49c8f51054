"""The user interface: events, terminal views, metrics lines, trackers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import events
from .board import counted, duration_text, megabytes, short, time_left_text
from .display import Display, Progress, View, open_view, poll_status
from .events import Checkpoint, Event, PageOpened, Progressed, RunStarted, Warning, from_json, timestamp
from .findings import found, print_findings
from .metrics_lines import Line, Metrics, held_out, missing_lines, named_rewards, read_written, step_numbers
from .output import Style, guarded_output, say, say_json, say_own, say_styled, say_text
from .progress_meter import ProgressMeter
from .styled_line import columns_of, padded
from .text_chart import glyphs_for, round_ticks, text_chart
from .trackers import FOLDER, Tracker, trackers_of
from .wording import accusation, layers_text, sentence, stage_lines, step_line

if TYPE_CHECKING:
    from .live_view import LiveView


if not TYPE_CHECKING:  # a type checker must not accept any name

    def __getattr__(name: str) -> Any:
        """Import LiveView at first use, as it brings in rich: `cocktail --help` must be fast."""
        if name != "LiveView":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(".live_view", __name__).LiveView
