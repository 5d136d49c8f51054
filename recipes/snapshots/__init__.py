"""Snapshots: the global model of a round on disk, folded from the packets of the ledger."""

from .snapshot_fold import Fold, KnownFingerprint, WrongFold
from .snapshot_folders import (
    Snapshot,
    SnapshotCancelled,
    altered_file,
    broken_files,
    list_snapshots,
    remove_snapshot,
    remove_unfinished_snapshots,
    write_chunk_hashes,
    write_sums,
)
