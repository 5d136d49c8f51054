"""An inner hub of a tree, as a process would run it. A run with one hub never loads this package."""

from .inner_aggregator import InnerAggregator
from .inner_run import InnerRun
