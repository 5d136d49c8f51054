"""Whom to audit, by whom, within a budget; and who is found.

    turn        every peer is audited once in a cycle, in an order that is drawn anew for each cycle
    case        a random sample of the newest lease that the peer has delivered: another member of the next
                round computes its gradient too. Where they disagree a third member decides later
    level       L of a peer: + 1 for each case in which it is wrong, - 1/8 for each of its own samples on
                which another agrees, at least 0 (CUSUM: Page, 1954). Above THRESHOLD it is convicted: three
                cases at least
    suspects    of a peer with L > 0 as many cases are open at once as would convict it; it decides on others
                only where nobody else is left. A peer of the host decides where there is one
    conclusive  nobody is called wrong where honest peers differ much, as at a very high learning rate: where
                the last 16 pairs that agreed differ in more than 20 bits at the median. Until there are 6
                such pairs, decided cases wait

All draws are seeded by a secret of the host and the round: no peer knows what will be audited, or by whom.
The third is asked only once the first has answered, so no auditor knows whether the other is an accomplice.
Budget: the cost of all audits is at most `share` of the cost of all leases before.

An opinion is a gradient sketch: BITS bits, of which two computations of the same gradient differ in few, and
two of unrelated gradients in half. The first two opinions that agree are right, and whoever is far from both
of them is wrong. So one peer alone convicts nobody: its word against another's is decided by a third.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from random import Random
from statistics import median

BITS, SKETCH = 128, 16  # of a sketch; in bytes
LIMIT = 48  # bits in which two sketches of one gradient may differ: a cosine of 0.38
MOST_OPINIONS = 5  # after which a case is dropped


@dataclass(frozen=True)
class Ruling:
    """The end of a case, by machine."""

    right: tuple[str, ...] = ()  # the two that agree
    wrong: Collection[str] = ()


@dataclass(eq=False)
class Case:
    """A sample whose gradient is computed by one peer after the other until two agree."""

    peer: str  # that had the sample in its lease
    machine: str  # of that peer then: its name may be another's when the case is decided
    lease: int  # round of that lease, which seeds the sketches
    sample: int
    opinions: dict[str, bytes] = field(default_factory=dict)  # by machine, in their order
    auditor: str = ""  # the peer whose opinion is awaited; "": nobody's yet
    asked: int = -1  # the round in which somebody was asked last

    def ruling(self) -> Ruling | None:
        """Decide the case. None: another opinion is needed."""
        for pair in combinations(self.opinions, 2):
            if self.between(*pair) <= LIMIT:
                others = self.opinions.keys() - pair
                far = {one for one in others if all(self.between(one, right) > LIMIT for right in pair)}
                return Ruling(pair, far)
        return Ruling() if len(self.opinions) == MOST_OPINIONS else None

    def between(self, one: str, other: str) -> int:
        """Count the bits in which two opinions differ. No gradient at all agrees with nothing."""
        a, b = self.opinions[one], self.opinions[other]
        return differing(a, b) if any(a) and any(b) else BITS


def differing(one: bytes, other: bytes) -> int:
    """Count the bits in which two sketches differ."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()


THRESHOLD = 2.0  # L above which a peer is convicted
FORGIVEN = 1 / 8  # of a case, by each sample on which another peer agrees
FRESH = 4  # rounds after which a lease is not audited any more: x' has moved on
LATE = 8  # rounds after which an answer, or an auditor, is not waited for any more
AT_ONCE = 16  # samples that one peer audits in a round
ENOUGH, LATEST = 6, 16  # pairs that agreed: so many say what is usual, and so many at most
UNCLEAR = 20  # a usual distance above which audits tell nothing: a cosine of 0.88

Cost = Callable[[int], float]  # of a sample


@dataclass(frozen=True)
class DeliveredLease:
    """A delivered lease: its samples, and the sketch of each."""

    lease: int
    samples: Sequence[int]
    sketches: bytes

    def case(self, peer: str, machine: str, number: int) -> Case:
        """Open a case on the `number`-th sample."""
        sketch = self.sketches[number * SKETCH : (number + 1) * SKETCH]
        return Case(peer, machine, self.lease, self.samples[number], {machine: sketch})


@dataclass
class Record:
    """The evidence on one peer."""

    level: float = 0.0  # L
    wrong: int = 0  # cases lost since L was 0
    ruled: int = 0  # cases decided in that time

    @property
    def why(self) -> str:
        return (
            f"in {self.wrong} of its last {self.ruled} audits two other peers agree on another gradient of "
            "the sample (audits)"
        )


@dataclass
class Figures:
    """Counts of a run, for `cocktail status`."""

    audited: int = 0  # samples computed once more
    disagreements: int = 0  # opinions that were wrong
    undecided: int = 0  # cases that were dropped
    cost: float = 0.0  # of the audits
    work: float = 0.0  # of the leases


@dataclass
class AuditBook:
    """State of a run's audits, by names of peers. Opinions and evidence are by machine: another name loses
    none of it, a newcomer under a name that is free again has none of it, and no machine audits itself."""

    share: float
    secret: str
    figures: Figures = field(default_factory=Figures)
    records: dict[str, Record] = field(default_factory=dict)  # of machines with L > 0
    convicted: dict[str, str] = field(default_factory=dict)  # machine -> why
    machines: dict[str, str] = field(default_factory=dict)  # of each peer
    own: Collection[str] = ()  # peers of the host
    cases: list[Case] = field(default_factory=list)  # open, the oldest first
    # fewer than ENOUGH, until it is known what is usual
    _decided: list[tuple[Case, Ruling]] = field(default_factory=list)
    _work: dict[str, DeliveredLease] = field(default_factory=dict)  # the newest of each peer
    _turn: list[str] = field(default_factory=list)  # peers whose turn in this cycle is to come
    _given: dict[int, dict[str, list[Case]]] = field(default_factory=dict)  # round -> auditor -> its cases
    _distances: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST))  # of pairs that agreed

    @property
    def median_distance(self) -> float | None:
        """The median distance of two opinions that agreed, mostly honest ones; None: not known yet."""
        return median(self._distances) if len(self._distances) >= ENOUGH else None

    @property
    def conclusive(self) -> bool:
        """True where an audit can tell who is wrong."""
        return self.median_distance is not None and self.median_distance <= UNCLEAR

    # ---- a round opens -------------------------------------------------------------------------------------

    def opens(self, round: int, members: Mapping[str, str], leased: float, cost: Cost) -> None:
        """Give out audits with the leases of a round. A round that is opened again has those it had.

        Args:
            members: those with a lease, and the machine of each.
            leased: cost of all leases.
        """
        renamed = {peer for peer, machine in members.items() if self.machines.get(peer, machine) != machine}
        self._work = {peer: work for peer, work in self._work.items() if peer not in renamed}
        self.machines |= members
        if round in self._given:
            return
        self.figures.work += leased
        random, given = Random(f"{self.secret}/{round}"), dict[str, list[Case]]()
        self._given = {r: cases for r, cases in self._given.items() if r >= round - LATE} | {round: given}
        self._work = {peer: work for peer, work in self._work.items() if round - work.lease <= FRESH}
        self._drop_late(round)
        waiting = [case for case in self.cases if not case.auditor]
        suspects = self._suspects(members, random)
        for case in chain(waiting, suspects, self._in_turn(members, random)):
            price = cost(case.sample)
            if self.figures.cost + price > self.share * self.figures.work:
                break
            if (auditor := self._auditor(case, members, given, random)) is None:
                continue
            case.auditor, case.asked = auditor, round
            given.setdefault(auditor, []).append(case)
            self.figures.cost += price
            self.figures.audited += 1
            if case not in waiting:
                self.cases.append(case)

    def tasks(self, round: int, peer: str) -> Sequence[Case]:
        """Return what a peer audits in a round, in the order of its answers."""
        return self._given.get(round, {}).get(peer, ())

    def _drop_late(self, round: int) -> None:
        """Give up auditors that do not answer, and cases that nobody is left for."""
        for case in self.cases:
            if case.auditor and case.asked < round - LATE:
                case.auditor = ""
        lost = [case for case in self.cases if not case.auditor and case.asked < round - 2 * LATE]
        self.figures.undecided += len(lost)
        self.cases = [case for case in self.cases if case not in lost]

    def _suspects(self, members: Collection[str], random: Random) -> Iterator[Case]:
        """Open as many cases on each suspect as would find it, the most suspect first."""
        levels = {peer: self._level(peer) for peer in members}
        for peer in sorted(members, key=lambda peer: (-levels[peer], peer)):
            if 0 < levels[peer] <= THRESHOLD:
                open_cases = sum(case.peer == peer for case in self.cases)
                yield from self._new_cases(peer, int(THRESHOLD - levels[peer]) + 1 - open_cases, random)

    def _level(self, peer: str) -> float:
        """Return L of a peer's machine."""
        record = self.records.get(self.machines[peer])
        return record.level if record is not None else 0.0

    def _in_turn(self, members: Collection[str], random: Random) -> Iterator[Case]:
        """Open a case on each peer whose turn it is; at most once a round."""
        if not any(peer in members for peer in self._turn):
            cycle = sorted(self._work.keys() - set(self._turn))
            random.shuffle(cycle)
            self._turn += cycle
        busy = {case.peer for case in self.cases}
        for peer in list(self._turn):
            if peer in self._work and (peer not in members or peer in busy):
                continue  # its turn comes later
            yield from self._new_cases(peer, 1, random)
            self._turn.remove(peer)

    def _new_cases(self, peer: str, count: int, random: Random) -> Iterator[Case]:
        if (work := self._work.get(peer)) is not None and count > 0:
            audited = {case.sample for case in self.cases if case.peer == peer}
            fresh = [n for n, sample in enumerate(work.samples) if sample not in audited]
            for number in random.sample(fresh, min(count, len(fresh))):
                yield work.case(peer, self.machines[peer], number)

    def _auditor(
        self, case: Case, members: Collection[str], given: Mapping[str, Sequence[Case]], random: Random
    ) -> str | None:
        """Draw an auditor from the members with the fewest audits. A peer of the host decides before others,
        a suspect after them; what it is asked first is evidence on itself as well."""

        decides = len(case.opinions) > 1

        def order(peer: str) -> tuple[bool, bool, int]:
            others, suspects = peer not in self.own, self._level(peer) > 0
            return decides and others, decides and suspects, len(given.get(peer, ()))

        apart = (peer for peer in sorted(members) if self.machines[peer] not in case.opinions)
        free = [peer for peer in apart if len(given.get(peer, ())) < AT_ONCE]
        best = min(map(order, free), default=None)
        return random.choice([peer for peer in free if order(peer) == best]) if free else None

    # ---- a round is committed ------------------------------------------------------------------------------

    def delivered(self, peer: str, work: DeliveredLease) -> None:
        """Take an accepted lease: what is audited next of this peer."""
        if work.samples:
            self._work[peer] = work

    def answered(self, peer: str, round: int, sketches: bytes) -> list[str]:
        """Take the answers of an auditor, each once; return the machines that are found by them."""
        for number, case in enumerate(self._given.get(round, {}).pop(peer, [])):
            if case.auditor != peer or case.asked != round or case not in self.cases:
                continue  # it came too late
            case.auditor = ""
            case.opinions[self.machines[peer]] = sketches[number * SKETCH : (number + 1) * SKETCH]
            if (ruling := case.ruling()) is None:
                continue
            self.cases.remove(case)
            if ruling.right:
                self._distances.append(case.between(*ruling.right))
                self._decided.append((case, ruling))
            else:
                self.figures.undecided += 1
        return self._judge() if self.median_distance is not None else []

    def _judge(self) -> list[str]:
        """Move the levels by the cases that are decided; return the machines that are found."""
        found: list[str] = []
        while self._decided:
            case, ruling = self._decided.pop(0)
            wrong = sorted(ruling.wrong) if self.conclusive else []
            self.figures.disagreements += len(wrong)
            self.figures.undecided += len(wrong) < len(ruling.wrong)
            for machine in wrong:
                found += self._was_wrong(machine)
            if case.machine in ruling.right:
                self._was_right(case.machine)
        return found

    def _was_wrong(self, machine: str) -> list[str]:
        record = self.records.setdefault(machine, Record())
        record.level += 1
        record.wrong += 1
        record.ruled += 1
        if record.level <= THRESHOLD or machine in self.convicted:
            return []
        self.convicted[machine] = record.why
        self._drop(machine)
        return [machine]

    def _drop(self, machine: str) -> None:
        """Drop the cases that a machine has an opinion on: they are about nobody else."""
        before = len(self.cases) + len(self._decided)
        self.cases = [case for case in self.cases if machine not in case.opinions]
        self._decided = [one for one in self._decided if machine not in one[0].opinions]
        self.figures.undecided += before - len(self.cases) - len(self._decided)

    def _was_right(self, machine: str) -> None:
        if (record := self.records.get(machine)) is not None:
            record.level -= FORGIVEN
            record.ruled += 1
            if record.level <= 0:
                del self.records[machine]

    # ---- peers that go -------------------------------------------------------------------------------------

    def gone(self, peer: str) -> None:
        """Ask others what this peer was asked; what is known of it stays, as it may come back."""
        self._work.pop(peer, None)
        for case in self.cases:
            if case.auditor == peer:
                case.auditor = ""

    def forget(self, machine: str) -> None:
        """Drop the evidence on a machine that is out: should the host admit it again, it begins anew."""
        self._drop(machine)
        self.records.pop(machine, None)
        self.convicted.pop(machine, None)
