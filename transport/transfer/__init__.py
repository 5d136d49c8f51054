"""Transfers of objects in acknowledged chunks, under a congestion window."""

from .bandwidth_budget import BandwidthBudget
from .chunks import (
    CHUNK,
    DIGEST,
    HASH_BLOCK,
    ChunkBuffer,
    ChunkFile,
    ChunkMap,
    ChunkSpool,
    FreeDisk,
    Spool,
    block_hashes,
    count_blocks,
)
from .congestion_window import FIRST_FRAGMENT, MIN_FRAGMENT
from .object_store import NO_ROW, ObjectSource, ObjectStore, memory_source
from .transfers import Download, PeerTransfers, Sink, Upload
from .upload_inbox import (
    MAX_CONNECTIONS,
    MAX_UPLOADS,
    POOL,
    UNWANTED_BYTES,
    VIOLATION,
    CompletedUpload,
    ConnectionRegistry,
    Inbox,
)
