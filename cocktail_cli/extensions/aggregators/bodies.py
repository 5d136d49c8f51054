"""Words between the hub, peers that aggregate shards, and members of their rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from transport.protocol import messages

from . import NAME as NAME

# Uploads to the hub: a part, followed by its round and an aggregator; a packet of shards, by round and
# attempt; error feedback, by the round that gives it up. An aggregator's server takes parts, serves packets.
PART, SHARD, ERROR = "part/", "shard/", "error/"

Shards = Annotated[list[messages.Count], Meta(max_length=1024)]


class AggregatorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer that aggregates shards in one round."""

    name: messages.Word
    shards: Shards
    key: messages.Word = ""
    address: messages.Word = ""  # of its server


Infos = Annotated[list[AggregatorInfo], Meta(max_length=4096)]


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a member's Round. The hub aggregates the shards of no peer."""

    aggregators: Infos  # by name
    members: messages.Names = []  # where the Round does not name them


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a Report: aggregator, this peer too -> digest of its part."""

    parts: messages.ByName


class Unmoved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a Committed: aggregators whose shards have not moved. Updates of these stay residuals. A
    Committed that is repeated has no body: the packet says which shards it has."""

    aggregators: messages.Names


class HandoffOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A residual handoff to merge once the round is committed: the object "handoff/<number>"."""

    number: messages.Count
    peer: messages.Word  # that handed it over
    share: messages.Finite  # of the mean


class Order(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """An Extension of the hub, to an aggregator."""

    round: messages.Count


class Open(Order, frozen=True):
    """Aggregate these shards, and accept the parts of these members. It comes before the Round."""

    shards: Shards
    keys: messages.ByName  # name -> key of each member
    fits: messages.Size = 0  # bytes: a limit for the aggregate; 0: not known
    rung: messages.Count = 0  # of the round


class Close(Order, frozen=True):
    """Aggregate the parts of these peers, each with its weight, and upload the packet of your shards as
    "shard/<round>/<attempt>", or answer Unusable. A later attempt replaces the one before."""

    attempt: messages.Count
    weights: Annotated[dict[messages.Word, messages.Finite], Meta(max_length=4096)]
    parts: messages.ByName = {}  # peer -> digest of its part, which tells it from a stale one
    handoffs: Annotated[list[HandoffOffer], Meta(max_length=4096)] = []


class Done(Order, frozen=True):
    """The round is committed. It comes before the Committed."""

    packet: messages.Word = ""  # digest of the receiver's packet, which is in it; empty: none is


class Holds(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of an aggregator: it has these parts completely, all of them in each message."""

    round: messages.Count
    parts: messages.ByName  # name -> digest


class Unusable(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of an aggregator, after Close: the part of this peer cannot be used. The hub closes the
    round again without it."""

    round: messages.Count
    attempt: messages.Count
    peer: messages.Word
    reason: messages.Line


class Resigns(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """An Extension of an aggregator that leaves, or cannot write: from the next round on it aggregates
    nothing."""

    last: bool = False  # no update of it will come either: no round waits for it
    lost: bool = False  # no packet of its shards will come in this round either


class ShardPacket(NamedTuple):
    """The packet that an aggregator has made of its shards."""

    aggregator: str
    shards: Sequence[int]
    packet: bytes


def digest_of(part: bytes) -> str:
    """Digest a part, to tell it from an earlier one of the same member, cut for other aggregators."""
    return short(hashlib.sha256(part).digest())


def short(sha256: bytes) -> str:
    return sha256.hex()[:16]
