"""Every message of the protocol as a typed struct. An unknown field or type is refused.

Control messages are small (<= 64 KiB) and have a connection of their own. Large data (weights, tokens,
packets) are *objects* with a name, which travel in chunks on bulk connections; control messages refer to them
by name. See transport/PROTOCOL.md.

`round` counts exchanges; `step` counts optimizer steps of the global batch. They differ after a round that
exchanges without computing (the last one) and when lost work is done again.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL = 2
VERSIONS = (PROTOCOL,)  # spoken by this hub
MAX_CONTROL = 64 * 1024  # bytes of one control message of a peer
MAX_ANSWER = 256 * 1024  # of one message of a hub, which names all members, or of a fragment
MAX_CHUNK = 1024 * 1024  # bytes of one chunk
UPLOAD_TAG = 8  # bytes of a digest that tell apart two uploads of one name
MAX_FINGERPRINT = 2**64 - 1
MOST_IN_FLIGHT = 8  # rounds
NAMED = 64  # members that a round names to each of them; in total that grows as their square

Count = Annotated[int, Meta(ge=0, le=2**62)]
Size = Annotated[int, Meta(ge=0, le=2**40)]  # bytes of an object, or tokens: their sums stay within 64 bits
Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]  # its sums and squares are finite
Figures = Annotated[list[Finite], Meta(max_length=8)]  # sums of an objective's figures beside its loss
Word = Annotated[str, Meta(max_length=128)]
Line = Annotated[str, Meta(max_length=2000)]
ObjectName = Annotated[str, Meta(min_length=1, max_length=300)]
AdminCommand = Literal["list", "kick", "ban", "unban", "approve", "deny", "token"]  # of the host
Digest = Annotated[bytes, Meta(max_length=32)]  # SHA-256, or empty if not known beforehand
# A frame has 64 KiB, and what its lists and tables take in memory many times that: so they are bounded too
Names = Annotated[list[Word], Meta(max_length=4096)]
ByName = Annotated[dict[Word, Word], Meta(max_length=4096)]
# Bodies of extensions by name: only the two halves of an extension read them
Body = Annotated[bytes, Meta(max_length=MAX_ANSWER)]
Extra = Annotated[dict[Word, Body], Meta(max_length=16)]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# ---- both ways, control ------------------------------------------------------------------------------------


class Extension(Message, frozen=True):
    """A body for the other half of an extension. It is not repeated after a reconnect."""

    name: Word  # of the extension
    body: Body


# ---- peer to hub, control ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a session. The hub answers Welcome or Refused."""

    protocol: int
    token: Word
    run: Word
    name: Word  # wanted name; the hub makes it unique among live peers
    hardware: Word = ""  # "RTX 3090, 24 GB" or "CPU, 8 cores": for people to read
    versions: Annotated[dict[Word, Word], Meta(max_length=32)] = {}
    alone: bool = True  # no other process of this peer uses that name: its lost session is over
    address: Word = ""  # "host:port" at which other peers reach it; empty: they do not
    extra: Extra = {}


class Resume(Message, frozen=True):
    """First message on a new control connection of a session that the peer already has.

    The hub answers Welcome(resumed=True) and repeats what may have been lost: the Committed the peer waits
    for, the open Round. Leases that the peer never received go back into the pool. The peer repeats what the
    hub may not have received. An unknown session is answered Refused("session"); the peer says Hello for a
    new one.
    """

    protocol: int
    run: Word
    name: Word
    session: Word
    waiting: Annotated[int, Meta(ge=-1)] = -1  # the round whose Committed this peer waits for; -1: none
    ready: bool = False  # it has said Ready in this session
    # rounds whose leases it knows of and has not delivered
    holds: Annotated[list[Count], Meta(max_length=4096)] = []
    term: Count = 0  # the highest this peer has met
    address: Word = ""  # as in Hello
    extra: Extra = {}


class Ready(Message, frozen=True):
    """The peer has the global model of `round` (packets 0 .. round-1 are applied) and can be given work."""

    round: Count
    fingerprint: int
    # Digests of the "base" and "tokenizer" files read from its disk, and of the "recipe". The hub compares
    # those that are named; a peer that read a snapshot names no base.
    holds: Annotated[dict[Word, Word], Meta(max_length=32)] = {}


class Report(Message, frozen=True, omit_defaults=True):
    """Sent with the packet of a round: the leases it delivers, and measurements of the peer."""

    round: Count
    fingerprint: int  # of the global model before this round, or of one `behind` rounds earlier
    delivers: Annotated[list[Count], Meta(max_length=4096)]  # rounds whose leases this packet delivers
    loss_sum: Finite = 0.0  # over the trained tokens of these leases
    tokens: Size = 0  # terms of the loss in these leases: trained tokens, or preference pairs
    compute_s: Finite = 0.0  # of the last step
    wait_s: Finite = 0.0  # time its device waited for the exchange in the last step
    # bytes of an aggregate that it can fetch while it computes (bandwidth_budget.py); 0: not known
    fits: Size = 0
    grad_norm: Finite = 0.0  # of the last step, before clipping, for people to read; 0: no gradient
    figures: Figures = []
    # rounds in flight at this peer, whose aggregates its global model lacks; 0 unless staleness is above 1
    behind: Annotated[int, Meta(ge=0, le=MOST_IN_FLIGHT)] = 0
    # local steps whose compute an exchange of the recipe's own packets takes on its own line, whatever this
    # round's are (leases.py); 0: not known
    needs: Annotated[float, Meta(ge=0, le=1e30)] = 0.0
    extra: Extra = {}


class Evaluated(Message, frozen=True):
    """Sum of the held-out loss of the global model of `round` over this peer's part of the evaluation set."""

    round: Count
    part: Count  # which part
    loss_sum: Finite
    tokens: Size  # terms of the loss: trained tokens, or samples
    figures: Figures = []


class Leave(Message, frozen=True):
    """The peer leaves; its undelivered leases go back into the pool. The hub answers Over."""

    reason: Line


class Ping(Message, frozen=True):
    """Heartbeat of the hub; answered by Pong."""

    sent: Finite  # the sender's own clock, echoed


class Pong(Message, frozen=True):
    sent: Finite


class AskStatus(Message, frozen=True, omit_defaults=True):
    """A question from a connection without a session: `cocktail status`."""

    protocol: int
    token: Word
    run: Word
    recipe: bool = False  # include its text


class Deciding(Message, frozen=True):
    """After AskStatus, on a connection without a session: its user decides whether to join.

    The hub shows that to the host until the user says Leave, hangs up, or joins with the same key. It answers
    nothing but Ping, or Refused where the token is wrong.
    """

    protocol: int
    token: Word
    run: Word
    name: Word
    hardware: Word = ""


class AskStop(Message, frozen=True):
    """The host ends or pauses the run: `cocktail stop`. `secret` is in its run.json, not in the URL."""

    protocol: int
    secret: Word
    run: Word
    now: bool = False  # do not wait for the exchange in flight
    pause: bool = False  # it may go on later


class AskAdmin(Message, frozen=True, tag="AskOwner"):
    """The host lists the peers or decides on one (admin_commands.py). Answered by Status or Refused."""

    protocol: int
    secret: Word
    run: Word
    order: AdminCommand
    peer: Word = ""  # a name, or the 16 digits of a key
    reason: Line = ""
    token: Word = ""  # the new one


# ---- hub to peer, control ----------------------------------------------------------------------------------


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of the base model."""

    name: str  # relative, no directories: "model.safetensors"
    size: Size
    sha256: str
    hashes: str = ""  # sha256, hex, of the object "hashes/base/<name>" (chunks.py); empty: there is none
    gated: bool = False  # not served here: each peer fetches it from the Hugging Face hub, with its own token


class SnapshotOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The global model of `round` as one file, the object "snapshot/<round>/model.safetensors"."""

    round: Count
    size: Size  # bytes of the file
    sha256: str  # hex, of its `hashes/` object: the hash of each MiB (chunks.py)
    log_bytes: Count  # of the packet log before `round`, which need not be fetched


class Welcome(Message, frozen=True):
    """The session is accepted: all that a peer must know before it computes."""

    protocol: int
    run: Word
    name: Word  # the peer's name in this run: its id, and its place in every ordered sum
    session: Word  # secret of this session, presented on the bulk connections and by Resume
    recipe: str  # resolved recipe, JSON
    recipe_hash: str  # sha256 of that text
    base: list[File]  # the base model, fetched as the objects "base/<name>" if not on disk already
    round: Count  # the newest committed round + 1: the swarm has the global model of this round
    # the hub sends a Ping this often; a peer that receives none for long redials
    ping_s: Annotated[float, Meta(ge=0, le=3600)]
    resumed: bool = False  # the session of a Resume, with all its leases
    term: Count = 0  # how often this run's ledger was opened to write; a hub of a lower one was replaced
    log_bytes: Count = 0  # of the packet log, all committed rounds
    snapshots: list[SnapshotOffer] = []  # the newest ones, by round
    extra: Extra = {}


class Refused(Message, frozen=True):
    """A session is refused. `reason`: for the user. This struct never changes.

    After the code "session" the peer says Hello again, after "term" it hangs up and looks for the newer hub.
    The others end its command: protocol, token, run, version, full, kicked, state, approval, unknown, over.
    """

    code: str
    reason: str


class Wait(Message, frozen=True):
    """A session has to wait: the host is asked. Welcome or Refused follows; until then Ping and Pong."""

    reason: str  # for the user


class Round(Message, frozen=True, omit_defaults=True):
    """A round opens. Sent to its members; the lease (token ids) is the object "lease/<round>"."""

    round: Count
    step: Count  # optimizer step of the run, for the learning-rate schedule
    steps: Count  # steps the run is expected to have
    members: Names  # sorted; none in a round of more than NAMED members
    samples: Count  # sequences in this peer's lease; 0: exchange only
    exchange: bool  # False: nothing is exchanged (the last evaluation; without a part: a call to catch up)
    eval_part: Count = 0  # the part of the evaluation set to evaluate the global model of this round on
    eval_parts: Count = 0  # 0: no evaluation in this round
    # Rounds that the lease is to last. Above 1 this peer is not a member of the next rounds until it says
    # Ready again, once it is done.
    spans: Annotated[int, Meta(ge=1)] = 1
    fits: Size = 0  # bytes, the minimum of the members' reports: a limit for aggregates; 0: not known
    rung: Count = 0  # of this round (leases.py): place among the settings that the recipe allows
    count: Count = 0  # members, where not all are named
    names: Word = ""  # `hash_of_names` of the members then
    extra: Extra = {}

    @property
    def peers(self) -> int:
        """Count the members."""
        return self.count or len(self.members)


class Committed(Message, frozen=True, omit_defaults=True):
    """Round `round` is durable. Its aggregated packet is the object "packet/<round>"."""

    round: Count
    size: Size  # bytes of the packet
    sha256: str
    # Whose packets are in it; any other peer keeps its update in the residual. In a round of more than NAMED
    # members the receiver's own name at most, as in `refused`.
    accepted: Names
    # peer -> why its packet could not be used: each is a strike
    refused: Annotated[dict[Word, Line], Meta(max_length=4096)] = {}
    count: Count = 0  # packets in it, where not all senders are named
    names: Word = ""  # `hash_of_names` of their senders then
    # seconds that the receiver's update has waited at the hub for the last one of the round
    waited: Annotated[float, Meta(ge=0, le=1e30)] = 0.0
    extra: Extra = {}


class Over(Message, frozen=True):
    """The run is over, or this peer's part in it."""

    reason: str
    finished: bool  # True: the run reached its end
    resumable: bool = False  # it failed or is paused and may be started again: peers keep their checkpoints


class Status(Message, frozen=True):
    """Answer to AskStatus: the JSON text of `cocktail status --json`. To AskAdmin: what was done."""

    status: str


# ---- bulk connections, both directions ---------------------------------------------------------------------


class Attach(Message, frozen=True):
    """First message on a bulk connection: its session. Answered by Attached or Refused("session")."""

    session: Word


class Attached(Message, frozen=True):
    # chunks that may be unacknowledged, all bulk connections together
    credit: Annotated[int, Meta(ge=1, le=2**16)]


class Put(Message, frozen=True):
    """The peer wants to upload an object (names.py). Answered by Have or PutDone."""

    name: ObjectName
    size: Annotated[int, Meta(ge=1, le=2**40)]
    sha256: Digest
    chunk: Annotated[int, Meta(ge=1024, le=MAX_CHUNK)]


class Have(Message, frozen=True):
    """The chunks of an upload that the hub has: bit i (lowest first) of `chunks` is chunk i."""

    name: str
    chunks: bytes


class Chunk(Message, frozen=True, omit_defaults=True):
    """Chunk `index` of an upload; its bytes are the second frame. Answered by Ack or PutDone."""

    name: ObjectName
    index: Count
    # first bytes of the sha256 of its Put; empty: any
    of: Annotated[bytes, Meta(max_length=UPLOAD_TAG)] = b""


class Ack(Message, frozen=True):
    name: str
    index: Count


class PutDone(Message, frozen=True):
    """The upload ended: `ok`, or the reason it was refused."""

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


ToHub = (
    Hello | Resume | Ready | Report | Evaluated | Leave
    | Extension | Ping | Pong | AskStatus | Deciding | AskStop
    | AskAdmin | Attach | Put | Chunk | Get
)  # fmt: skip
ToPeer = (
    Welcome | Refused | Wait | Round
    | Committed | Extension | Over | Ping | Pong | Status | Attached | Have | Ack | PutDone | Data | NoObject
)  # fmt: skip
