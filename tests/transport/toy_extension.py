"""An extension for tests: peers say how they are, the hub repeats it, and who is unwell gets no lease."""

from collections.abc import Mapping, Sequence
from typing import Any

from transport.actions import CommitDone
from transport.hub import HubParts
from transport.ledger import Counted
from transport.membership import Session
from transport.protocol import Cost, Event, ObjectKind, ProtocolError, SampleRanges, events, messages
from transport.scheduling import CommitSeconds, Exchange, HubExtension, Lines
from transport.transfer import ObjectStore, memory_source

NOTE = ObjectKind("note/<round>", ("peer",), "9 bytes", Cost.READ)
WELL, UNREADABLE = b"well", b"?"


def readable(body: bytes) -> bytes:
    if body == UNREADABLE:
        raise ProtocolError("no word on how it is")
    return body


class Health(HubExtension):
    name = "health"

    def __init__(self, hub: HubParts) -> None:
        self._out = hub.out
        self.said: dict[str, bytes] = {}  # by name of a peer
        self.unwell: set[str] = set()
        self.accepted: list[set[str]] = []
        self.leased: list[dict[str, int]] = []
        self.reports: list[tuple[str, int, float]] = []  # name, round, when
        self.took: list[CommitSeconds] = []
        self.lines: Lines | None = None

    def hello(self, session: Session, body: bytes, now: float) -> None:
        self.said[session.name] = readable(body)

    def welcome(self, session: Session) -> bytes:
        return b"welcome " + self.said.get(session.name, b"")

    def received(self, session: Session, body: bytes, now: float) -> None:
        self.said[session.name] = readable(body)
        self._out.send(session.conn, messages.Extension(self.name, b"heard " + body))

    def serve(self, objects: ObjectStore) -> None:
        objects.serve(NOTE, lambda session, name, of: memory_source(b"a note " + of[0].encode()))

    def watch(self, lines: Lines) -> None:
        self.lines = lines

    def no_lease(self, session: Session, round: int) -> str:
        return "it is unwell" if session.name in self.unwell else ""

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        self.leased.append({ex.members[session]: len(ranges) for session, ranges in granted.items()})

    def announce(self, ex: Exchange, session: Session) -> bytes:
        return self.said.get(session.name, b"")

    def heard(self, session: Session, report: messages.Report, now: float) -> None:
        self.reports.append((session.name, report.round, now))

    def reported(self, session: Session, body: bytes, claims: Mapping[int, SampleRanges]) -> None:
        self.said[session.name] = body

    def refusals(self, ex: Exchange) -> dict[str, str]:
        return {name: "it says that it lies" for name, said in self.said.items() if said == b"I lie"}

    def counted(self, round: int, counted: Sequence[Counted], took: CommitSeconds) -> dict[str, bytes]:
        self.took.append(took)
        return {one.session: b"thanks" for one in counted}

    def committed(self, ex: Exchange, done: CommitDone, now: float) -> Sequence[Event]:
        self.accepted.append(set(done.packets))
        return [events.OfExtension(0.0, f"round {ex.round}")]

    def round_fields(self) -> Mapping[str, Any]:
        return {"rounds": len(self.accepted)}

    def session_ended(self, session: Session) -> None:
        self.said.pop(session.name, None)

    def status(self) -> Mapping[str, Any]:
        return {"health": {name: said.decode() for name, said in self.said.items()}}
