"""Inner hubs: a tree of hubs for more peers than one can serve. A run with one hub never loads it."""

from .inner_hub import InnerHub
from .inner_work import InnerResidual, InnerWork, LeasedSample, SentUpdate
from .parent_leases import ParentLeases
