"""Words between the two halves of passing."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from transport.protocol import messages

NAME = "passing"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer that has the run's files on its disk."""

    name: messages.Word
    key: messages.Word
    address: messages.Word


class PacketSource(Source, frozen=True, forbid_unknown_fields=True):
    """A peer that passes on the chunks first .. stop-1 of a round's packet."""

    first: messages.Count
    stop: messages.Count


class FileHelpers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a newcomer's Welcome: peers that may pass on files of the base model and of snapshots."""

    helpers: Annotated[list[Source], Meta(max_length=64)]


class Sources(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """An Extension of the hub, before Committed: peers that pass on parts of the packet of `round`. All else
    is fetched from the hub, and so is the receiver's own part. The packet must have the hash of Committed,
    whoever sent its parts."""

    round: messages.Count
    chunk: Annotated[int, Meta(ge=1024, le=messages.MAX_CHUNK)]  # bytes
    # the receiver is one of them if it is to pass on a part
    sources: Annotated[list[PacketSource], Meta(max_length=64)]
    keys: messages.ByName = {}  # only then: name -> key of each member that may fetch it


class Newcomer(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of the hub, to a peer that a FileHelpers names: this one may fetch files from it."""

    name: messages.Word
    key: messages.Word


class SourceFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An Extension of a peer: a source has not passed its part of a packet on, or (`wrong`) not the bytes
    that the hub has; of files only the latter."""

    source: messages.Word
    wrong: bool
    reason: messages.Line


class PassingStatus(msgspec.Struct):
    """Fields of a hub's status."""

    passing: bool = False
