"""The hub's audits: hands them out with the leases of a round, and judges reports as their round closes.

opens      who audits which samples, besides its lease        the body of Round, the object audit/<round>
reported   a report must have a sketch of every sample of the leases it delivers, and of its audits
refusals   those that have not, and those that are found: their updates are refused, each a strike
committed  accepted reports are audited next; answers decide cases
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from transport.actions import CommitDone
from transport.hub import HubParts
from transport.membership import Session
from transport.protocol import Cost, Event, ObjectKind, ProtocolError, SampleRanges, read_msgpack, sample_ids
from transport.scheduling import Exchange, HubExtension
from transport.transfer import ObjectStore

from .audit_book import BITS, SKETCH, AuditBook, DeliveredLease
from .bodies import AUDITED, NAME, Answers, Tasks

SAMPLES = ObjectKind(f"{AUDITED}<round>", ("peer",), "`Tasks.leases` x the longest sample", Cost.ROUND)


@dataclass(frozen=True)
class Arrived:
    """The delivery of one member of the open round."""

    works: Sequence[DeliveredLease]
    answers: Mapping[int, bytes]  # round -> sketches of what it audited then
    lacks: str  # why its update is refused; "": it is complete


class AuditCoordinator(HubExtension):
    """Audits of a run, by session and by name; its book knows machines, by their keys."""

    name = NAME

    def __init__(self, hub: HubParts, share: float) -> None:
        self._out, self._members, self._own_key = hub.out, hub.members, hub.settings.own_key
        self._cost = hub.settings.cost or (lambda sample: 1.0)
        self.book = AuditBook(share, hub.secret)
        self._arrived: dict[str, Arrived] = {}  # by name, in the open round
        self._told = False  # the host knows that audits are not clear

    def opens(self, ex: Exchange, granted: Mapping[str, SampleRanges]) -> None:
        """Give out audits to members with a lease of this round alone."""
        ids = {session: sample_ids(ranges) for session, ranges in granted.items()}
        leased = sum(self._cost(sample) for samples in ids.values() for sample in samples)
        names = [ex.members[session] for session, of in ids.items() if of and session not in ex.spans]
        self._arrived.clear()
        self.book.own = {name for name in names if self._is_own(ex, name)}
        self.book.opens(ex.round, {name: self._machine(ex, name) for name in names}, leased, self._cost)

    def announce(self, ex: Exchange, session: Session) -> bytes:
        """Name the leases of the samples that a member is to audit."""
        tasks = self.book.tasks(ex.round, session.name)
        return msgspec.msgpack.encode(Tasks([task.lease for task in tasks])) if tasks else b""

    def serve(self, objects: ObjectStore) -> None:
        """Serve the samples that a session audits in a round."""
        objects.serve(
            SAMPLES, lambda session, _, of: objects.packed(session, "audit", int(of[0]), self.samples)
        )

    def samples(self, session: str, round: int) -> list[int] | None:
        """Return the samples that a session audits in a round; None: it has none."""
        peer = self._members.get(session)
        tasks = self.book.tasks(round, peer.name) if peer is not None else ()
        return [task.sample for task in tasks] or None

    def reported(self, session: Session, body: bytes, claims: Mapping[int, SampleRanges]) -> None:
        """Take the sketches of a report, and note what it lacks."""
        works, answers, lacks, name = list[DeliveredLease](), dict[int, bytes](), "", session.name
        try:
            said = read_msgpack(body, Answers, "its sketches") if body else Answers()
        except ProtocolError:
            said = Answers()
        for round, ranges in claims.items():
            samples, sketches = sample_ids(ranges), said.sketches.get(round, b"")
            audits, answer = len(self.book.tasks(round, name)), said.audits.get(round, b"")
            if len(sketches) != SKETCH * len(samples):
                lacks = f"no gradient sketch of each of the {len(samples)} samples of its lease"
            elif audits and len(answer) != SKETCH * audits:  # none: those of a hub before this one
                lacks = f"no gradient sketch of each of the {audits} samples that it audits"
            if lacks:
                lacks = f"its report has {lacks} of round {round} (audits)"
                break
            works.append(DeliveredLease(round, samples, sketches))
            answers[round] = answer
        self._arrived[name] = Arrived(works, answers, lacks)

    def refusals(self, ex: Exchange) -> dict[str, str]:
        """Refuse who is found, or lacks sketches; of the host's own peers it is told only."""
        others = {name: one for name, one in self._arrived.items() if not self._is_own(ex, name)}
        found = {name: self.book.convicted.get(self._machine(ex, name), "") for name in others}
        return {name: why for name, one in others.items() if (why := found[name] or one.lacks)}

    def committed(self, ex: Exchange, done: CommitDone, now: float) -> Sequence[Event]:
        """Decide cases by what the accepted updates of a round came with; tell the host who is found."""
        for name in sorted(done.packets.keys() & self._arrived.keys()):
            for round, answer in self._arrived[name].answers.items():
                self._tell(self.book.answered(name, round, answer))
            for work in self._arrived[name].works:
                self.book.delivered(name, work)
        self._arrived.clear()
        distance = self.book.median_distance
        if distance is not None and not self.book.conclusive and not self._told:
            self._told = True
            said = f"sketches of one gradient differ in {distance:.0f} of {BITS} bits between two peers"
            self._out.warn(f"audits find nobody while {said}: the learning rate, or dropout, is too high")
        return ()

    def _tell(self, found: Sequence[str]) -> None:
        for machine in found:
            for name in sorted(name for name, one in self.book.machines.items() if one == machine):
                self._out.warn(f"found by audits: {self.book.convicted[machine]}", name)

    def session_ended(self, session: Session) -> None:
        """Ask others what this peer was asked."""
        self.book.gone(session.name)

    def forget_key(self, key: str) -> None:
        """Drop the evidence on a key."""
        self.book.forget(key)

    def status(self) -> dict[str, Any]:
        figures = asdict(self.book.figures)
        work, cost = figures.pop("work"), figures.pop("cost")
        suspects = sorted(name for name, of in self.book.machines.items() if of in self.book.records)
        figures["usual_bits"] = self.book.median_distance
        share = round(cost / work, 5) if work else 0.0
        return {NAME: figures | {"share": share, "suspects": suspects}}

    def _machine(self, ex: Exchange, name: str) -> str:
        """Name the judge that a peer is: its key; of the host's own peers, each is one."""
        key = ex.keys.get(name, "")
        return name if not key or self._is_own(ex, name) else key

    def _is_own(self, ex: Exchange, name: str) -> bool:
        return bool(self._own_key) and ex.keys.get(name) == self._own_key
