"""Inner hubs: a tree of hubs for more peers than one hub can serve. A run with one hub never loads this package."""

from .inner_hub import InnerHub
from .inner_work import InnerWork, LeasedSample, SentUpdate
from .parent_leases import ParentLeases
