"""Weights on disk as one vector of P numbers, and snapshots of it."""

from .atomic_safetensors import header, write_whole
from .model_folder import check_folder, quiet, written_whole
from .parameter_layout import AT_ONCE, Flat, Layout, layout_of
from .snapshot_fold import (
    Abandoned,
    Fold,
    Known,
    Snapshot,
    check_room,
    clear_leftovers,
    snapshots,
    weights_in,
    write_beside,
    write_hashes,
)
from .stored_weights import (
    ADAPTER,
    WEIGHTS,
    Kind,
    Stored,
    StoredVector,
    blueprint,
    in_memory,
    open_vector,
    stored_in,
    tied_names,
    write_header,
)

__all__ = [
    "ADAPTER",
    "AT_ONCE",
    "WEIGHTS",
    "Abandoned",
    "Flat",
    "Fold",
    "Kind",
    "Known",
    "Layout",
    "Snapshot",
    "Stored",
    "StoredVector",
    "blueprint",
    "check_folder",
    "check_room",
    "clear_leftovers",
    "header",
    "in_memory",
    "layout_of",
    "open_vector",
    "quiet",
    "snapshots",
    "stored_in",
    "tied_names",
    "weights_in",
    "write_beside",
    "write_hashes",
    "write_header",
    "write_whole",
    "written_whole",
]
