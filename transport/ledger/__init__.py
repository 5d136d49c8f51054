"""Durable state: a run's ledger, and append-only packet logs."""

from .books import DATABASE, set_aside
from .journal import JOURNAL
from .ledger_copy import TAKEN_OVER, LedgerChanges, LedgerCopy, changes_after, updates_between
from .packet_log import HEADER_SIZE, PACKETS, TAIL, PacketLog, pack_header, read_packets
from .run_ledger import (
    RECENT,
    VOTING_ROUNDS,
    Counted,
    EvaluationRow,
    KnownPeer,
    Ledger,
    OpenSession,
    Recovered,
    RoundRow,
    is_locked,
    lock_exclusively,
    merge_wal,
)
from .update_log import (
    ERROR_FEEDBACK,
    UPDATES,
    RoundUpdates,
    UpdateLog,
    damaged_updates,
    pack_updates,
    read_rounds,
    read_updates,
    retired,
    scan_rounds,
)
