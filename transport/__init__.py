"""Connects peers with their hub and stores the decisions of a run. The protocol: transport/PROTOCOL.md."""

from transport.hub import Hub
from transport.ledger import Ledger
from transport.peer import (
    CatchUp,
    CatchUpDownloads,
    LinkLimits,
    PeerIdentity,
    PeerLink,
    WantedFile,
    ask_admin,
    ask_status,
    ask_stop,
)
from transport.protocol import RunKeys, RunSettings, RunURL, parse_url
from transport.wire import Bandwidth
