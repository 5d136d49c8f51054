"""Every message of the protocol, as typed structs, in msgpack. An unknown field or type is refused.

Control messages are small (<= 64 KiB) and have a connection of their own. Whatever is big (weights, tokens,
packets) is an *object* with a name and travels in chunks on bulk connections; control messages only refer to
it by name. See transport/PROTOCOL.md.

`round` counts exchanges; `step` counts optimizer steps of the global batch. They differ where a round
exchanges without computing (the drain after the last step) and where lost work is done again.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL = 1
VERSIONS = (PROTOCOL,)  # what this hub can talk to
MAX_CONTROL = 64 * 1024  # bytes of one control message
MAX_CHUNK = 1024 * 1024  # bytes of one chunk
UPLOAD_TAG = 8  # bytes of a digest that tell an upload from another of its name
MAX_FINGERPRINT = 2**64 - 1

Count = Annotated[int, Meta(ge=0, le=2**62)]
Size = Annotated[int, Meta(ge=0, le=2**40)]  # bytes of an object, or tokens: sums of them stay within 64 bits
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]  # sums and squares of them are numbers still
Word = Annotated[str, Meta(max_length=128)]
Line = Annotated[str, Meta(max_length=2000)]
ObjectName = Annotated[str, Meta(min_length=1, max_length=300)]
AdminCommand = Literal["list", "kick", "ban", "unban", "approve", "deny", "token"]  # of the owner
Digest = Annotated[bytes, Meta(max_length=32)]  # SHA-256, or empty: not known beforehand


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# ---- peer to hub, control ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a session. The hub answers Welcome or Refused."""

    protocol: int
    token: Word
    run: Word
    name: Word  # wanted name; the hub makes it unique among live peers
    hardware: Word = ""  # "RTX 3090, 24 GB" or "CPU, 8 cores": shown to people, never acted upon
    versions: Annotated[dict[Word, Word], Meta(max_length=32)] = {}
    alone: bool = True  # no other process of this peer goes by that name: a lost session of it is over
    owns: bool = False  # it can own shards
    address: Word = ""  # "host:port", where other members reach it; empty: through the hub alone


class Resume(Message, frozen=True):
    """First message on a new control connection of a session that the peer already has.

    The hub answers Welcome(resumed=True) and says again what may have been lost: the Committed the peer waits
    for, the Round that is open. Leases that the peer never heard of go back into the pool. The peer says
    again what the hub may not have heard. A session that the hub does not know is answered
    Refused("session"): the peer says Hello and gets a new one.
    """

    protocol: int
    run: Word
    name: Word
    session: Word
    waiting: Annotated[int, Meta(ge=-1)] = -1  # the round whose Committed this peer waits for; -1: none
    ready: bool = False  # it has said Ready in this session
    holds: Annotated[
        list[Count], Meta(max_length=4096)
    ] = []  # rounds whose leases it knows of and has not delivered
    term: Count = 0  # the highest this peer has met
    owns: bool = False  # as in Hello
    address: Word = ""


class Ready(Message, frozen=True):
    """The peer holds x' of `round` (the packets 0 .. round-1 are applied) and can be given work."""

    round: Count
    fingerprint: int
    # What it computed from: "base" and "tokenizer" (digests of these files as read from its disk), "recipe".
    # Compared with the hub's; what is not named (no base was read where a snapshot was) is not compared.
    holds: Annotated[dict[Word, Word], Meta(max_length=32)] = {}


class Report(Message, frozen=True):
    """What travels with the packet of a round: what the packet delivers, and how the peer fared."""

    round: Count
    fingerprint: int  # of x' before this round
    delivers: Annotated[list[Count], Meta(max_length=4096)]  # rounds whose leases this packet delivers
    loss_sum: Finite = 0.0  # over the trained tokens of these leases
    tokens: Size = 0  # trained tokens of these leases
    compute_s: Finite = 0.0  # of the last step
    wait_s: Finite = 0.0  # time its device waited for the exchange in the last step
    # Where peers own shards: owner -> the digest (owners.py) of the part that is for it, this peer too.
    parts: Annotated[dict[Word, Word], Meta(max_length=4096)] = {}
    fits: Size = 0  # bytes of an aggregate that it can fetch beside its compute (slot.py); 0: not known


class Evaluated(Message, frozen=True):
    """Sum of the held-out loss of x' of `round` over this peer's part of the evaluation set."""

    round: Count
    part: Count  # which part
    loss_sum: Finite
    tokens: Size


class Leave(Message, frozen=True):
    """The peer says goodbye; its outstanding leases go back into the pool. The hub answers Over."""

    reason: Line


class Holds(Message, frozen=True):
    """An owner has parts of these peers, whole: name -> digest, all of them each time it says so."""

    round: Count
    parts: Annotated[dict[Word, Word], Meta(max_length=4096)]


class Resigns(Message, frozen=True):
    """An owner is to leave, or cannot own: from the next round on it wants to own nothing."""

    last: bool = False  # nor will an update of it come: no round waits for it
    lost: bool = False  # nor a packet of its shards in this round


class Unusable(Message, frozen=True):
    """To `Close`: the part of this peer cannot be used. The hub closes the round again without it."""

    round: Count
    attempt: Count
    peer: Word
    reason: Line


class Ping(Message, frozen=True):
    """Sign of life of the hub; answered by Pong."""

    sent: Finite  # the sender's own clock, echoed


class Pong(Message, frozen=True):
    sent: Finite


class AskStatus(Message, frozen=True, omit_defaults=True):
    """A question from a connection that is no peer: `cocktail status`."""

    protocol: int
    token: Word
    run: Word
    recipe: bool = False  # its text too


class AskStop(Message, frozen=True):
    """The owner ends the run or pauses it: `cocktail stop`. `secret` is in the owner's run.json, not in the
    URL."""

    protocol: int
    secret: Word
    run: Word
    now: bool = False  # do not wait for the exchange in flight
    pause: bool = False  # it may go on later


class AskAdmin(Message, frozen=True, tag="AskOwner"):
    """The owner asks who is in the run, or decides it (owner.py). `secret` as in AskStop. Answered by Status
    or Refused."""

    protocol: int
    secret: Word
    run: Word
    order: AdminCommand
    peer: Word = ""  # whom: a name, or the 16 digits of a key
    reason: Line = ""
    token: Word = ""  # the new one


# ---- hub to peer, control ----------------------------------------------------------------------------------


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the base model."""

    name: str  # relative, no directories: "model.safetensors"
    size: Size
    sha256: str
    hashes: str = ""  # sha256, hex, of the object "hashes/base/<name>" (chunks.py); empty: there is none


class SnapshotOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """x' of `round` as one file, the object "snapshot/<round>/model.safetensors"."""

    round: Count
    size: Size  # bytes of the file
    sha256: str  # hex, of its `hashes/` object (chunks.py), which says what each MiB of the file hashes to
    log_bytes: Count  # of the packet log before `round`: what needs not be fetched


class Welcome(Message, frozen=True):
    """The session is accepted: all a peer must know before it computes."""

    protocol: int
    run: Word
    name: Word  # the peer's name in this run: its id, and its place in every ordered sum
    session: Word  # secret of this session, presented on the bulk connections and by Resume
    recipe: str  # resolved recipe, JSON
    recipe_hash: str  # sha256 of that text
    base: list[File]  # the base model, fetched as the objects "base/<name>" if not on disk already
    round: Count  # the newest committed round + 1: x' of this round is what the swarm holds
    # the hub sends a Ping this often; a peer that hears nothing for long dials again
    ping_s: Annotated[float, Meta(ge=0, le=3600)]
    resumed: bool = False  # the session of a Resume, with all its leases
    term: Count = 0  # how often this run's ledger was opened to write; a hub of a lower one was replaced
    log_bytes: Count = 0  # of the packet log, all committed rounds
    snapshots: list[SnapshotOffer] = []  # the newest ones, by round


class Refused(Message, frozen=True):
    """No session. `code` is one of REFUSALS; `reason` is for the user. This struct never changes."""

    code: str
    reason: str


class Wait(Message, frozen=True):
    """No session yet: the run's host is asked. Welcome or Refused follows; until then Ping and Pong."""

    reason: str  # for the user


class AggregatorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer that owns shards of the vector in one round."""

    name: str
    shards: list[int]
    key: str = ""
    address: str = ""  # empty: what it is to have goes through the hub


class Round(Message, frozen=True):
    """A round opens. Sent to its members; the lease (token ids) is the object "lease/<round>"."""

    round: Count
    step: Count  # optimizer step of the run, for the learning-rate schedule
    steps: Count  # steps the run is expected to have
    members: list[str]  # sorted names
    samples: Count  # sequences in this peer's lease; 0: exchange only
    exchange: bool  # False: nothing is exchanged (the last evaluation)
    eval_part: Count = 0  # evaluate part `eval_part` of `eval_parts` of the evaluation set, x' of this round
    eval_parts: Count = 0  # 0: no evaluation in this round
    owners: list[AggregatorInfo] = []  # peers that own shards, by name; what they do not own is the hub's
    keys: dict[str, str] = {}  # told to owners alone: name -> key of each member
    # Rounds that the lease is to last. Above 1 this peer is no member of those after this one before it says
    # Ready again, which it does when it is done.
    spans: Annotated[int, Meta(ge=1)] = 1
    fits: Size = 0  # bytes, the least that members say: owners' packets should have no more; 0: not known


class HandoffOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an owner is to add to its error once the round is committed: the object "estate/<number>"."""

    number: Count
    peer: str  # who left it
    share: Finite  # of the mean


class Close(Message, frozen=True):
    """To an owner: aggregate the parts of these peers, each with its weight, and upload the packet of your
    shards as "shard/<round>/<attempt>"; or say who is `Unusable`. A later attempt takes the place of the one
    before."""

    round: Count
    attempt: Count
    shards: list[int]
    weights: dict[str, Finite]
    parts: dict[str, str] = {}  # peer -> the digest of its part: another is of before, or of another round
    estates: list[HandoffOffer] = []


class Committed(Message, frozen=True):
    """Round `round` is durable. Its aggregated packet is the object "packet/<round>"."""

    round: Count
    size: Size  # bytes of the packet
    sha256: str
    accepted: list[str]  # whose packets are in it; a peer not named here takes its packet back (LATE)
    refused: dict[str, str] = {}  # whose packets could not be used, and why: each is a strike
    lost: list[str] = []  # owners whose shards have not moved: what was sent for these is taken back
    moved: dict[str, str] = {}  # the other owners -> the digest of the packet of its shards
    recalled: bool = False  # said by a hub that was restarted: who was lost is to be seen in the packet


class Over(Message, frozen=True):
    """The run is over, or this peer's part in it."""

    reason: str
    finished: bool  # True: the run reached its end
    resumable: bool = (
        False  # it failed or is paused, and may be started again: what a peer has is worth keeping
    )


class Status(Message, frozen=True):
    """Answer to AskStatus: the object of `cocktail status --json`, as JSON text. To AskOwner: what was
    done."""

    status: str


# ---- bulk connections, either way --------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """First message on a bulk connection: whose it is. Answered by Attached or Refused("session")."""

    session: Word


class Attached(Message, frozen=True):
    # chunks that may be under way unacknowledged, all bulk connections together
    credit: Annotated[int, Meta(ge=1, le=2**16)]


class Put(Message, frozen=True):
    """The peer wants to upload an object (uploads.py has the names). Answered by Have, or PutDone."""

    name: ObjectName
    size: Annotated[int, Meta(ge=1, le=2**40)]
    sha256: Digest
    chunk: Annotated[int, Meta(ge=1024, le=MAX_CHUNK)]


class Have(Message, frozen=True):
    """What the hub already holds of an upload: bit i (lowest first) of `chunks` is chunk i."""

    name: str
    chunks: bytes


class Chunk(Message, frozen=True, omit_defaults=True):
    """Chunk `index` of an upload; its bytes are the second frame. Answered by Ack or PutDone."""

    name: ObjectName
    index: Count
    of: Annotated[bytes, Meta(max_length=UPLOAD_TAG)] = b""  # how the sha256 of its Put begins; empty: of any


class Ack(Message, frozen=True):
    name: str
    index: Count


class PutDone(Message, frozen=True):
    """The upload ended: `ok`, or why it is not wanted (the round is closed, too large)."""

    name: str
    ok: bool
    reason: str = ""


class Get(Message, frozen=True):
    """The peer wants chunk `index` of an object. Answered by Data or NoObject."""

    name: ObjectName
    index: Count
    chunk: Annotated[int, Meta(ge=1024, le=MAX_CHUNK)]


class Data(Message, frozen=True):
    """Chunk `index` of an object; its bytes are the second frame. `size`, `sha256`: of the whole."""

    name: str
    index: Count
    size: Size
    sha256: Digest = b""


class NoObject(Message, frozen=True):
    name: str
    reason: str


# Refused.code -> exit code of the command that is told so. Two are not for people: after "session" the peer
# says Hello again, after "term" it hangs up and looks for the hub that came later.
REFUSALS = {
    "protocol": 6,
    "token": 6,
    "run": 6,
    "version": 6,
    "full": 6,
    "kicked": 6,
    "state": 6,
    "approval": 6,
    "unknown": 6,
    "over": 7,
    "session": 75,
    "term": 75,
}

ToHub = (
    Hello
    | Resume
    | Ready
    | Report
    | Evaluated
    | Leave
    | Holds
    | Resigns
    | Unusable
    | Ping
    | Pong
    | AskStatus
    | AskStop
    | AskAdmin
    | Attach
    | Put
    | Chunk
    | Get
)
ToPeer = (
    Welcome
    | Refused
    | Wait
    | Round
    | Close
    | Committed
    | Over
    | Ping
    | Pong
    | Status
    | Attached
    | Have
    | Ack
    | PutDone
    | Data
    | NoObject
)
