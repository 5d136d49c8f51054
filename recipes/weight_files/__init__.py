"""Weights on disk as one vector of P numbers, and snapshots of it."""

from .atomic_safetensors import header, write_safetensors
from .model_folder import atomic_folder, check_model_folder, quiet_transformers
from .parameter_layout import GRADIENT_CHUNK, FlatParameters, Layout, layout_of
from .snapshot_fold import (
    Fold,
    FoldCancelled,
    KnownFingerprint,
    Snapshot,
    check_disk_space,
    list_snapshots,
    remove_unfinished_snapshots,
    weights_file_in,
    write_chunk_hashes,
    write_model_files,
)
from .stored_weights import (
    ADAPTER_FILE,
    WEIGHTS_FILE,
    StoredTensor,
    StoredVector,
    TensorSpec,
    meta_model,
    open_tensors,
    open_vector,
    safetensors_header,
    stored_from_tensor,
    tied_names,
)

__all__ = [
    "ADAPTER_FILE",
    "GRADIENT_CHUNK",
    "WEIGHTS_FILE",
    "FlatParameters",
    "Fold",
    "FoldCancelled",
    "KnownFingerprint",
    "Layout",
    "Snapshot",
    "StoredTensor",
    "StoredVector",
    "TensorSpec",
    "atomic_folder",
    "check_disk_space",
    "check_model_folder",
    "header",
    "layout_of",
    "list_snapshots",
    "meta_model",
    "open_tensors",
    "open_vector",
    "quiet_transformers",
    "remove_unfinished_snapshots",
    "safetensors_header",
    "stored_from_tensor",
    "tied_names",
    "weights_file_in",
    "write_chunk_hashes",
    "write_model_files",
    "write_safetensors",
]
