"""Transfers of objects in acknowledged chunks, under a congestion window."""

from .bandwidth_budget import BandwidthBudget
from .chunks import DIGEST, HASH_BLOCK, ChunkBuffer, ChunkFile, ChunkMap, block_hashes, count_blocks
from .congestion_window import FIRST_FRAGMENT, MIN_FRAGMENT
from .connection_registry import MAX_CONNECTIONS, UNWANTED_BYTES, VIOLATION, ConnectionRegistry
from .object_store import NO_ROW, ObjectSource, ObjectStore, memory_source
from .spool import ChunkSpool, DiskRoom, FreeDisk, Spool
from .transfers import CHUNK, Download, PeerTransfers, Sink, Upload
from .upload_inbox import MAX_UPLOADS, POOL, CompletedUpload, Inbox
