"""A peer whose model is sharded over the GPUs of one machine (FSDP2)."""

from .fsdp_peer import build_fsdp_peer, check_fsdp
from .fsdp_worker import FsdpWorker
from .shared_memory import anonymous_file
