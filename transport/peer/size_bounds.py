"""Bounds of the objects that a peer fetches: known before a byte is kept, whatever the sender says."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Protocol

from transport.protocol import messages
from transport.transfer import DIGEST, count_blocks

OF_SAMPLES = "so many samples, of at most the recipe's max_length"
# Beginnings of the names of all objects that may be fetched, each with the reason of its bound; extensions
# have rows of their own. A name without a row cannot be fetched.
BOUNDS = {
    "lease/": OF_SAMPLES,
    "packet/": "the recipe's compression of a round's sample",
    "packets/": "the recipe's compression of these rounds' samples",
    "eval": "so many samples as a run may evaluate, of at most the recipe's max_length",
    "base/": "the size that the run has announced",
    "snapshot/": "the size that the run has announced",
    "hashes/": "32 bytes for each MiB of the file",
}


def bound_of(name: str, of_extensions: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return why an object cannot be longer than it may be. Raises KeyError for a name without a row."""
    for prefix, reason in chain(BOUNDS.items(), of_extensions.items()):
        if name == prefix or (prefix.endswith("/") and name.startswith(prefix)):
            return reason
    raise KeyError(f"{name} is no object that a peer fetches")


def hashes_size(size: int) -> int:
    """Return the bytes of the hashes of a file of `size` bytes."""
    return DIGEST * count_blocks(size)


class SizeBounds(Protocol):
    """Bounds objects of a run by its recipe and its model. All methods return bytes."""

    def lease(self, opened: messages.Round) -> int:
        """Bound the lease of a round. Raises ProtocolError where the round is none that this run can have."""

    def packet(self, round: int) -> int:
        """Bound the aggregate of a round."""
