"""A peer whose model is sharded over the GPUs of one machine (FSDP2)."""

from .fsdp_peer import check_spreadable, spread_peer
from .fsdp_worker import Rank
from .shared_memory import nameless

__all__ = [
    "Rank",
    "check_spreadable",
    "nameless",
    "spread_peer",
]
