"""The wire contract: messages, the run URL, keys, errors, events, settings."""

from . import events, messages
from .errors import (
    AddressInUse,
    AnnouncedAnew,
    Leaving,
    LedgerBusy,
    LedgerDamaged,
    LedgerError,
    LinkLost,
    NoRoom,
    NotServed,
    ProtocolError,
    RefusedByHub,
    RolledBack,
    RunOver,
    SessionRenewed,
    TooLong,
    TransportError,
    Unreachable,
    UpdateRejected,
    UrlError,
)
from .events import PAUSED, Event, RoundCommitted, RunEnded, Warned
from .keys import (
    RUN_NAME,
    TOKEN_BYTES,
    CurveKeys,
    OpenRoute,
    Route,
    RunKeys,
    RunURL,
    as_z85,
    join_address,
    parse_address,
    parse_url,
    short_key,
    to_base64,
    to_bytes,
)
from .message_codec import (
    OtherVersion,
    decode_to_hub,
    decode_to_peer,
    encode,
    read_json,
    read_msgpack,
    versions,
)
from .names import (
    HANDOFF,
    PACKET,
    TRIAL,
    UPDATE,
    Cost,
    ObjectKind,
    clean_name,
    hash_of_names,
    pattern_of,
    round_of,
    unique_name,
)
from .run_settings import HubDelegate, Rung, RunSettings, WeightedPacket
from .sample_ranges import (
    SamplePool,
    SampleRanges,
    count_samples,
    minus,
    pack_ranges,
    ranges_of,
    sample_ids,
    unpack_ranges,
)
