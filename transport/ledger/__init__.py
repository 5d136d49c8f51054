"""What a run has decided, on disk before anybody is told."""

from .packet_log import HEADER_SIZE, PacketLog, read_packets
from .residual_handoffs import (
    HUB,
    Given,
    Left,
    merged,
    of_shards,
    remaining,
)
from .run_ledger import (
    Counted,
    EvaluationRow,
    Known,
    Ledger,
    OpenSession,
    Recovered,
    RoundRow,
    take_lock,
)
from .update_log import (
    RoundUpdates,
    Update,
    UpdateLog,
    pieces,
    unpacked,
    whole,
)

__all__ = [
    "HEADER_SIZE",
    "HUB",
    "Counted",
    "EvaluationRow",
    "Given",
    "Known",
    "Ledger",
    "Left",
    "OpenSession",
    "PacketLog",
    "Recovered",
    "RoundRow",
    "RoundUpdates",
    "Update",
    "UpdateLog",
    "merged",
    "of_shards",
    "pieces",
    "read_packets",
    "remaining",
    "take_lock",
    "unpacked",
    "whole",
]
