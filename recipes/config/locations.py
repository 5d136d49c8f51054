"""Tell paths of this machine from names on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

# suffix of a data file -> the builder of `datasets` that reads it
LOADERS = {".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def is_hub_id(path: str) -> bool:
    """Whether this names data on the hub: nothing that is here, or that looks as if it should be."""
    if path.startswith(("builtin:", "http://", "https://")) or looks_like_data_file(path):
        return False
    return not Path(path).exists() and not any(c in path for c in "*?[")


def looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).is_absolute()


def looks_like_data_file(path: str) -> bool:
    return looks_like_path(path) or Path(path).suffix in {".jsonl", *LOADERS}
