"""The Hugging Face hub and https addresses."""

from .https_fetch import Unfetched, opened, text_at
from .hub_access import OFFLINE, asked, gated, hub_cache
from .hugging_face import (
    Repository,
    Told,
    commit_of_data,
    fetch,
    fetch_data,
    is_no_answer,
    licence,
)
from .remote_code import CODE, loading

__all__ = [
    "CODE",
    "OFFLINE",
    "Repository",
    "Told",
    "Unfetched",
    "asked",
    "commit_of_data",
    "fetch",
    "fetch_data",
    "gated",
    "hub_cache",
    "is_no_answer",
    "licence",
    "loading",
    "opened",
    "text_at",
]
