"""HubExtension: an optional capability at a hub, which calls its methods and knows no more of it.

Its messages are bodies: bytes that only its two halves read, by its name in `extra` of Hello, Welcome, Round,
Report and Committed, or alone in a message Extension. A peer may send any bytes there: a body that cannot be
read is the peer's fault and never an error of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, Protocol

from transport.actions import CommitDone, Shell
from transport.ledger import Counted
from transport.membership import Session
from transport.protocol import Event, SampleRanges, WeightedPacket, messages, pattern_of
from transport.transfer import ChunkBuffer, ObjectStore
from transport.wire import Crossed

from .exchange import Exchange


class UnderWay(NamedTuple):
    """An update that has come in part."""

    seconds: float  # since its first message
    came: int  # bytes
    size: int


class Lines(Shell, Protocol):
    """The hub's threads, and the lines of sessions as its sockets see them."""

    def crossed(self, session: str) -> list[Crossed]:
        """Return what has crossed each connection of a session, as far as the system tells."""

    def under_way(self, session: str, round: int, now: float) -> UnderWay | None:
        """Return what is here of a session's update for a round; None: none of it, or all."""


Places = tuple[str, ...]  # what stands in those of a form


@dataclass(frozen=True)
class UploadKind:
    """Uploads whose names have a form, as those of `ObjectKind`. Both functions are given the places."""

    form: str
    refusal: Callable[[Session, Places], str | None]  # why one is not wanted now; None: it is
    took: Callable[[Session, Places, ChunkBuffer, float], object]  # one that is whole
    largest: int = 0  # bytes; 0: as of an update

    def places(self, name: str) -> Places | None:
        """Return what stands in the places; None where the name is of another form."""
        found = pattern_of(self.form).fullmatch(name)
        return None if found is None else found.groups()


class Sums(NamedTuple):
    """Sums the updates of a round, in the commit thread: methods of transport.HubDelegate, which says how."""

    aggregate: Callable[[int, Sequence[WeightedPacket]], bytes]
    inherit: Callable[[str, bytes, float], None]
    committed: Callable[[int, bytes], None]


class CommitSeconds(NamedTuple):
    """Seconds that the parts of a commit took."""

    sum: float
    disk: float  # until the round was durable


class HubExtension:
    """An optional capability at a hub. Every method does nothing unless it is overridden.

    All are called in the hub's I/O thread, so none may wait, but for `noted` and `counted`, which run in the
    commit thread, as what `sums` returns, and what `serve` adds, which runs in the reader thread.
    """

    name = ""  # of its bodies
    role = ""  # of the sessions whose Hello has a body for it: they are no peers, and train nothing
    copies = False  # it is told of each change of the ledger: `wrote`
    dials = False  # it sends peers to others: the hub tries the addresses at which they can be reached
    uploads: Sequence[UploadKind] = ()  # that it takes from peers
    at_once = 0  # of these, that a session may have under way in the round that opens

    def serve(self, objects: ObjectStore) -> None:
        """Add rows of objects that peers may fetch."""

    def watch(self, lines: Lines) -> None:
        """Take the lines of sessions, once the hub has sockets."""

    def sums(self, inner: Sums) -> Sums:
        """Return what sums updates around `inner`, before the hub begins. Its `aggregate` may return nothing
        where no update can be used now, and raise Abandoned."""
        return inner

    def answers(self, key: str, body: bytes) -> bool:
        """Tell whether a Hello with this body, or a Resume, is answered now; else its key dials again."""
        return True

    def admits(self, conn: bytes, body: bytes) -> messages.Refused | bool:
        """Tell whether a session of its role may begin; False: once the host approves it."""
        return False

    def reached(self, session: Session, ok: bool) -> None:
        """Take the result of dialling a session of its role, which it has asked for."""

    def hello(self, session: Session, body: bytes, now: float) -> None:
        """Take the body of the Hello that begins a session, or of the Resume with which one from before a
        restart of the hub comes back; empty: it has none. Raises ProtocolError where it cannot be read: that
        is counted, and the session goes on."""

    def welcome(self, session: Session) -> bytes:
        """Return the body for the Welcome of a session, a new or resumed one; empty: none."""
        return b""

    def welcomed(self, session: Session) -> None:
        """Say more after a Welcome, and again what a peer on a new connection may have missed."""

    def answered(self, session: Session, pinged: float) -> None:
        """Note the answer to the ping of this time: what was said before has come."""

    def received(self, session: Session, body: bytes, now: float) -> None:
        """Take the body of an Extension message. Raises ProtocolError as `hello`."""

    def no_lease(self, session: Session, round: int) -> str:
        """Return why a ready peer gets no lease of the round that opens; empty: it may have one. Without, it
        is a member only to deliver the leases that it has."""
        return ""

    def choose(
        self, round: int, ready: Sequence[Session], holding: Collection[str], newcomers: int
    ) -> list[Session] | None:
        """Choose the members of the round that opens, by name; None: the hub does. One extension may.

        Args:
            ready: those that could be members.
            holding: sessions of those with a lease that they have not delivered.
            newcomers: at most so many members without an update in the run.
        """
        return None

    def may_close(self, arrived: int, missing: int) -> bool:
        """Tell whether a round may close with so many updates, before the longest wait, without those that it
        would wait for."""
        return True

    def enough(self, ex: Exchange) -> bool:
        """Tell whether a round closes at once with the updates that are here. Nobody is late then."""
        return False

    def may_evaluate(self, session: Session, round: int) -> bool:
        """Tell whether a ready peer may compute a part of the final evaluation. If none may, all do."""
        return True

    def caught_up(self, session: Session) -> None:
        """Note a peer that says that it is ready, at the round `session.at`."""

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        """Note a round that opens, and the samples of each session's lease."""

    def announce(self, ex: Exchange, session: Session) -> bytes:
        """Return the body for a member's Round; empty: none."""
        return b""

    def moves(self, session: str) -> None:
        """Note that a session has asked for bytes of an object, or sent some."""

    def heard(self, session: Session, report: messages.Report, now: float) -> None:
        """Note a Report as it comes: before its packet is here, or too late for its round."""

    def whole(self, session: Session) -> bool:
        """Tell whether all is here that belongs to a member's update, beside its Report and packet. If not,
        `Rounds.check_arrived` is called again once it may be."""
        return True

    def reported(self, session: Session, body: bytes, claims: Mapping[int, SampleRanges]) -> None:
        """Take the body of a member's Report, once its packet is here too.

        Args:
            body: empty where the peer has sent none.
            claims: the samples of each lease that the packet delivers.
        """

    def closes(self, ex: Exchange) -> None:
        """Note a round that closes, before its updates are summed."""

    def refusals(self, ex: Exchange) -> Mapping[str, str]:
        """Return whose updates are refused as the round closes, by name, and why: each is a strike."""
        return {}

    def may_strike(self, peer: str) -> bool:
        """Tell whether a rejected update counts against its sender."""
        return True

    def noted(self, round: int) -> str:
        """Return what it has to know of the run after a restart, written with the round that is about to be
        committed; empty: nothing new."""
        return ""

    def counted(self, round: int, counted: Sequence[Counted], took: CommitSeconds) -> Mapping[str, bytes]:
        """Return the body for the Committed of each session, once a round is in the ledger."""
        return {}

    def attests(self, peer: str) -> str:
        """Return what a receipt of a peer says beside its samples; empty: nothing. In the commit thread."""
        return ""

    def wrote(self, rounds: int) -> None:
        """Note that the ledger has changed, and has so many rounds; told where an extension `copies` it."""

    def may_announce(self, round: int) -> bool:
        """Tell whether a durable round may be announced. It is asked again after whatever comes."""
        return True

    def committed(self, ex: Exchange, done: CommitDone, now: float) -> Sequence[Event]:
        """Note that a round has ended, with the updates of `done.packets`; of none: it is opened again.
        Returns what the host is told after the event of the round."""
        return ()

    def round_fields(self) -> Mapping[str, Any]:
        """Return the fields that it adds to the event of a committed round."""
        return {}

    def session_ended(self, session: Session) -> None:
        """Forget a session."""

    def forget_key(self, key: str) -> None:
        """Forget the evidence on a key that was banned for it, or whose ban the host has lifted."""

    def removed(self, key: str) -> None:
        """Note that the host has kicked or banned a key."""

    def tick(self, now: float) -> None:
        """Let time pass up to `now`."""

    def deadline(self) -> float:
        """Return when `tick` has something to do. inf: never."""
        return inf

    def ended(self) -> None:
        """Note that the run is over."""

    def stops(self) -> None:
        """Let no thread wait for peers any more: this hub stops, whatever the reason."""

    def peer_status(self, session: Session) -> Mapping[str, Any]:
        """Return its figures of a peer for `cocktail status --json`; they replace those of the same name."""
        return {}

    def status(self) -> Mapping[str, Any]:
        """Return its fields of `cocktail status --json`."""
        return {}
