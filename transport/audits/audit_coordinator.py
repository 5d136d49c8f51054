"""The hub's audits: hands them out with the leases of a round, and judges reports as their round closes.

opens      who audits which samples, besides its lease        Round.audits, the object audit/<round>
arrived    a report must have a sketch of every sample of the leases it delivers, and of its audits
refusals   those that have not, and those that are found: their updates are refused, each a strike
committed  accepted reports are audited next; answers decide cases
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import replace

from transport.actions import Outbox
from transport.membership import Session
from transport.protocol import Cost, ObjectKind, RunSettings, SampleRanges, messages, sample_ids
from transport.scheduling import Exchange

from .audit_book import AuditBook, DeliveredLease
from .audit_case import BITS, SKETCH

AUDITED = ObjectKind("audit/<round>", ("peer",), "`Round.audits` x the longest sample", Cost.ROUND)


@dataclass(frozen=True)
class Arrived:
    """The delivery of one member of the open round."""

    works: Sequence[DeliveredLease]
    answers: Mapping[int, bytes]  # round -> sketches of what it audited then
    lacks: str  # why its update is refused; "": it is complete


class AuditCoordinator:
    """Audits of a run, by session and by name; its book knows machines, by their keys."""

    def __init__(self, settings: RunSettings, out: Outbox, secret: str) -> None:
        self._out, self._own_key = out, settings.own_key
        self._cost = settings.cost or (lambda sample: 1.0)
        self.book = AuditBook(settings.audit_share, secret)
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

    def announcement(self, ex: Exchange, session: Session, message: messages.Round) -> messages.Round:
        """Add a member's audits to the announcement of its round."""
        tasks = self.book.tasks(ex.round, session.name)
        return replace(message, audits=[task.lease for task in tasks]) if tasks else message

    def samples(self, name: str, round: int) -> list[int]:
        """Return the samples that a peer audits in a round: the object audit/<round>."""
        return [task.sample for task in self.book.tasks(round, name)]

    def arrived(self, name: str, report: messages.Report, claims: Mapping[int, SampleRanges]) -> None:
        """Take the sketches of a report; `claims`: the samples of each lease that it delivers."""
        works, answers, lacks = list[DeliveredLease](), dict[int, bytes](), ""
        for round, ranges in claims.items():
            samples, sketches = sample_ids(ranges), report.sketches.get(round, b"")
            audits, answer = len(self.book.tasks(round, name)), report.audits.get(round, b"")
            if len(sketches) != SKETCH * len(samples):
                lacks = f"no gradient sketch of each of the {len(samples)} samples of its lease"
            elif audits and len(answer) != SKETCH * audits:  # none: those of a hub before this one
                lacks = f"no gradient sketch of each of the {audits} samples that it audits"
            if lacks:
                lacks = f"its report has {lacks} of round {round} (swarm.audit_share)"
                break
            works.append(DeliveredLease(round, samples, sketches))
            answers[round] = answer
        self._arrived[name] = Arrived(works, answers, lacks)

    def refusals(self, ex: Exchange) -> dict[str, str]:
        """Return the senders of this round whose updates are refused, and why; of the host's own peers it is
        told only."""
        others = {name: one for name, one in self._arrived.items() if not self._is_own(ex, name)}
        found = {name: self.book.convicted.get(self._machine(ex, name), "") for name in others}
        return {name: why for name, one in others.items() if (why := found[name] or one.lacks)}

    def committed(self, accepted: AbstractSet[str]) -> None:
        """Decide cases by what the accepted updates of a round came with; tell the host who is found."""
        for name in sorted(accepted & self._arrived.keys()):
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

    def _tell(self, found: Sequence[str]) -> None:
        for machine in found:
            for name in sorted(name for name, one in self.book.machines.items() if one == machine):
                self._out.warn(f"found by audits: {self.book.convicted[machine]}", name)

    def gone(self, name: str) -> None:
        """Ask others what this peer was asked."""
        self.book.gone(name)

    def forget(self, key: str) -> None:
        """Drop the evidence on a key that is struck out, or whose ban the host lifts."""
        self.book.forget(key)

    def status(self) -> dict[str, Any]:
        """Return the figures of `cocktail status --json`."""
        figures = asdict(self.book.figures)
        work, cost = figures.pop("work"), figures.pop("cost")
        suspects = sorted(name for name, of in self.book.machines.items() if of in self.book.records)
        figures["usual_bits"] = self.book.median_distance
        return figures | {"share": round(cost / work, 5) if work else 0.0, "suspects": suspects}

    def _machine(self, ex: Exchange, name: str) -> str:
        """Name the judge that a peer is: its key; of the host's own peers, each is one."""
        key = ex.keys.get(name, "")
        return name if not key or self._is_own(ex, name) else key

    def _is_own(self, ex: Exchange, name: str) -> bool:
        return bool(self._own_key) and ex.keys.get(name) == self._own_key
