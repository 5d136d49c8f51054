"""Words between a standby and the hub, and between the hub and its peers; the list of a hub's files."""

from __future__ import annotations

import msgspec

from transport.protocol import messages

NAME = "standby"  # also the role of its session


class Follow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a standby's Hello. The host approves it, or `secret` is the host's. Then Grown tells what
    there is to fetch, and Stored what is on the standby's disk."""

    place: messages.Word  # "host:port" at which peers find it, or "host:port+place:port"
    secret: messages.Word = ""


class Grown(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of the hub, to its standby: the ledger has changed, and so many rounds are committed."""

    number: messages.Count  # counts the changes
    rounds: messages.Count


class Stored(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of the standby: its disk has what the Grown of this number told of, and so many rounds."""

    number: messages.Count
    rounds: messages.Count


class Standby(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of the hub, to peers: the machine that takes over where this hub is lost. They dial it
    then, and prove this key of it. With an empty place the hub has lost that standby and asks for Backs."""

    number: messages.Count  # grows with each standby of a run
    place: messages.Word = ""
    key: messages.Word = ""


class Backs(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An Extension of a peer: it has not voted for the standby of this number, and will not."""

    number: messages.Count


class ReplicaFile(msgspec.Struct, frozen=True):
    """One file of a hub's folder."""

    path: str  # in the folder, with slashes
    size: messages.Size
    stamp: int  # of its content: another one is another file


class Manifest(msgspec.Struct, frozen=True):
    """The files of a hub's folder that do not grow with each round, and what its process knows of the run: an
    object in JSON."""

    files: list[ReplicaFile]
    saved: int  # the round before which the saved error feedback is; 0: there is none
    own_key: str  # of the host's machine, which has no vote
    record: dict[str, object]  # of the run, without its secrets
