"""Durable state: a run's ledger, and append-only packet logs."""

from .book_opening import open_books, set_aside
from .books import (
    DATABASE,
    JOURNAL,
    MALFORMED,
    Change,
    Rows,
    count_rounds,
    entry_of,
    first_head_of,
    key_of,
    linked,
    meta_rows,
    meta_value,
    packets_end,
    rows_of,
)
from .packet_log import HEADER_SIZE, PACKETS, TAIL, PacketLog, pack_header, read_headers, read_packets
from .run_ledger import (
    LOCK,
    RECENT,
    Counted,
    EvaluationRow,
    KnownPeer,
    Ledger,
    OpenSession,
    Recovered,
    RoundRow,
    RungRow,
    check_packet_log,
    is_locked,
    lock_exclusively,
    packet_records,
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
