"""Objects in acknowledged chunks, under a congestion window."""

from .bandwidth_budget import Slot
from .chunks import BLOCK, LONGEST, PartFile, Parts
from .congestion_window import SMALLEST
from .connection_registry import FLOWS, Flows
from .object_store import Objects, Source, in_memory
from .transfers import (
    AT_ONCE,
    CHUNK,
    Arrived,
    BulkPeer,
    Download,
    Inbox,
    Upload,
)

__all__ = [
    "AT_ONCE",
    "BLOCK",
    "CHUNK",
    "FLOWS",
    "LONGEST",
    "SMALLEST",
    "Arrived",
    "BulkPeer",
    "Download",
    "Flows",
    "Inbox",
    "Objects",
    "PartFile",
    "Parts",
    "Slot",
    "Source",
    "Upload",
    "in_memory",
]
