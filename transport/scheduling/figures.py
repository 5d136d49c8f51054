"""Figures of a run from what its peers say, and evaluations of x': no single peer's number is one of them.

A number that cannot be is dropped: a loss outside the bounds that the objective states, terms that are not
those of the leases, seconds that have not passed. What is left enters a mean within a range around the middle
one; of two, around the one nearer to the run's last figure. So where all are honest the figure is their exact
mean, and a lie moves it by the width of that range times its sender's weight.

In an evaluation members compute the held-out loss of x' on parts of the evaluation set. It is due before the
first step, then whenever `eval_every` steps have passed, and of the finished model. Where members have
several keys, each part is computed by two of them. Two results agree if their means are within 2 % (machines
round differently). Of two that do not, a third decides: the middle one counts. Where there is no third member
the one nearer to the run's last loss counts.

If a part is lost with its peer, or nobody delivers it for long, the evaluation is repeated in the next round,
by others. Of the final one only the missing parts are assigned again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from math import inf, isfinite
from statistics import median, median_high, median_low

from msgspec.structs import replace

from transport.ledger import EvaluationRow
from transport.protocol import messages

WIDEST = 10.0  # times: a norm that is further from the middle one counts as that
WIDE, NARROW = 0.5, 1.0  # the range of a loss around the middle one, each way: relative; nats at least
LEAST_S = 1e-6  # seconds that a gradient takes

Bounds = tuple[float, float]


def bounded_mean(parts: Mapping[str, tuple[float, float]], before: float | None) -> float | None:
    """Average over several peers, the mean of each brought within a range around the middle one; None for
    none.

    Args:
        parts: peer -> its sum, and the number of terms in that, above 0.
        before: the last figure; None: this is the first one.
    """
    if not parts:
        return None
    means = [found / terms for found, terms in parts.values()]
    middle = middle_of(means, before)
    width = max(WIDE * abs(middle), NARROW)
    low, high = middle - width, middle + width
    within = (
        found if low <= found / n <= high else n * min(high, max(low, found / n))
        for found, n in parts.values()
    )
    return sum(within) / sum(terms for _, terms in parts.values())


def middle_of(values: Sequence[float], before: float | None) -> float:
    """Return the middle one of the values; of two, the one nearer to the last figure. One value alone is held
    against that figure itself.

    The figure is no vote beside others: a lie is a part of it, so the middle would follow a lie that is
    repeated.
    """
    if before is None:
        return median_low(values)
    if len(values) == 1:
        return before
    return min(median_low(values), median_high(values), key=lambda value: abs(value - before))


def middle_norm(norms: Iterable[float], before: float | None) -> float | None:
    """Return the median of norms, each at most WIDEST times the middle one; None for none above 0."""
    found = [norm for norm in norms if norm > 0]
    if not found:
        return None
    middle = middle_of(found, before)
    return median(max(middle / WIDEST, min(middle * WIDEST, norm)) for norm in found)


def possible_report(report: messages.Report, elapsed: float) -> tuple[messages.Report, list[str]]:
    """Return a report without the seconds and norms that cannot be, and what was dropped, for people.

    Args:
        elapsed: seconds that its sender can have worked at most.
    """
    wrong = list[str]()
    if report.compute_s and not LEAST_S <= report.compute_s <= elapsed:
        wrong.append(f"{report.compute_s:.3g} s of compute")
        report = replace(report, compute_s=0.0)
    if not 0 <= report.wait_s <= elapsed:
        wrong.append(f"{report.wait_s:.3g} s of waiting")
        report = replace(report, wait_s=0.0)
    if report.grad_norm < 0:
        wrong.append(f"a gradient of norm {report.grad_norm:.3g}")
        report = replace(report, grad_norm=0.0)
    return report, wrong


def why_impossible(sums: Sequence[float], terms: int, counted: int, bounds: Sequence[Bounds]) -> str:
    """Say why sums cannot be; "": they can.

    Args:
        sums: of the loss, then of the objective's further figures: none of them, or all.
        terms: what their sender says that each sum has.
        counted: what the hub counts.
        bounds: of the mean of each.
    """
    if terms != counted:
        return f"{terms} terms of the loss, where its samples have {counted}"
    if len(sums) not in (1, len(bounds)):
        return f"{len(sums) - 1} figures beside the loss, where there are {len(bounds) - 1}"
    for what, found, (low, high) in zip(chain(["loss"], repeat("figure")), sums, bounds, strict=False):
        if not isfinite(found) or (terms and not low <= found / terms <= high):
            return f"a {what} of {found / max(terms, 1):.3g}, which is not within {low:g} and {high:g}"
    return ""


@dataclass(frozen=True)
class RoundFigures:
    """A round's figures, and the peers whose numbers cannot be, with the reason."""

    loss: float | None
    further: tuple[float, ...]  # means of the objective's further figures
    impossible: dict[str, str]


def round_figures(
    said: Mapping[str, tuple[float, int, Sequence[float]]],
    counted: Mapping[str, int],
    bounds: Sequence[Bounds],
    before: float | None,
) -> RoundFigures:
    """Compute a round's mean loss, and the means of the objective's further figures.

    Args:
        said: peer -> sum of losses, its terms, sums of the further figures, as it reports them.
        counted: peer -> terms of the samples that it delivers.
        bounds: of the loss of a term, then of each further figure.
        before: the loss of the round before; None: there was none.
    """
    said = {p: one for p, one in said.items() if one[0] or one[1]}  # others tell no loss
    why = {
        p: why_impossible((loss, *sums), terms, counted[p], bounds) for p, (loss, terms, sums) in said.items()
    }
    good = {p: one for p, one in sorted(said.items()) if not why[p] and one[1]}
    loss = bounded_mean({p: (total, float(terms)) for p, (total, terms, _) in good.items()}, before)
    further = mean_columns({p: (sums, terms) for p, (_, terms, sums) in good.items()})
    return RoundFigures(loss, further, {peer: reason for peer, reason in why.items() if reason})


def mean_columns(parts: Mapping[str, tuple[Sequence[float], int]]) -> tuple[float, ...]:
    """Average each of several figures over peers, as `bounded_mean`; empty where some peer sent none.

    Args:
        parts: peer -> sums over its terms, and their number.
    """
    sums = {peer: (values, count) for peer, (values, count) in parts.items() if count}
    sizes = {len(values) for values, _ in sums.values()}
    if len(sizes) != 1:
        return ()
    columns = ({p: (values[at], count) for p, (values, count) in sums.items()} for at in range(*sizes))
    return tuple(found for column in columns if (found := bounded_mean(column, None)) is not None)


PAIR, THIRD = 2, 3  # opinions on a part: usually, and where two disagree
NEAR, NEAR_ABSOLUTE = 0.02, 0.01  # of two means that agree: relative; nats
PATIENCE, PATIENCE_S = 5.0, 30.0  # times the quickest member's seconds that others have, and at least
REPEATS = 2  # of an evaluation whose parts are lost or disputed, before what is there counts


def agree(one: float, other: float) -> bool:
    """Tell whether two means of one part can be of one model."""
    return abs(one - other) <= max(NEAR_ABSOLUTE, NEAR * max(abs(one), abs(other)))


def mean_of(m: messages.Evaluated) -> float:
    return m.loss_sum / m.tokens if m.tokens else 0.0


@dataclass
class Evaluation:
    """One evaluation of x' of `round`, in `parts` parts, each by so many members."""

    round: int
    step: int
    parts: int
    final: bool
    opinions: int = 1
    began: float = 0.0
    reference: float | None = None  # the run's last loss: decides between two
    holders: dict[int, list[str]] = field(default_factory=dict)  # part -> sessions that were asked
    results: dict[int, dict[str, messages.Evaluated]] = field(default_factory=dict)  # by part and session
    late: set[str] = field(default_factory=set)  # holders that others do not wait for any more
    quickest: float | None = None  # seconds until the first result
    last: bool = False  # nobody else can be asked where two disagree
    closed: bool = False  # those who have not delivered had long enough: what is there counts

    def arrived(self, session: str, m: messages.Evaluated, now: float = 0.0) -> bool:
        """Take a member's result of a part; False where this session does not hold that part."""
        here = self.results.setdefault(m.part, {})
        if m.round != self.round or session not in self.holders.get(m.part, ()) or session in here:
            return False
        here[session] = m
        self.quickest = now - self.began if self.quickest is None else self.quickest
        return True

    def lost(self, session: str) -> bool:
        """Drop an ended session. Returns whether an opinion is missing now."""
        part = self.part_of(session)
        if part is not None:
            self.holders[part].remove(session)
        return part is not None

    def part_of(self, session: str) -> int | None:
        """Return the part that this session has to compute, or None."""
        return next((p for p, s in self.holders.items() if session in s and session not in self._of(p)), None)

    def _of(self, part: int) -> Mapping[str, messages.Evaluated]:
        return self.results.get(part, {})

    def result(self, part: int) -> messages.Evaluated | None:
        """Return the result of a part that counts; None: it is not known yet."""
        here = sorted(self._of(part).values(), key=mean_of)
        if not here or (len(here) < self.opinions and not self.closed):
            return None
        if len(here) == PAIR and not agree(mean_of(here[0]), mean_of(here[1])):
            if not (self.last or self.closed):
                return None
            near = self.reference if self.reference is not None else mean_of(here[0])
            return min(here, key=lambda m: abs(mean_of(m) - near))
        middle = median_low([mean_of(m) for m in here])
        return next(m for m in here if mean_of(m) == middle)

    @property
    def missing(self) -> list[int]:
        """List the parts that others have to compute, as often as opinions are missing that nobody is asked
        for."""
        found = list[int]()
        for part in range(self.parts):
            here = self._of(part)
            pair = [mean_of(m) for m in here.values()]
            disputed = len(pair) == PAIR and not agree(*pair)
            wanted = max(self.opinions, THIRD if disputed else 0)
            found += [part] * (
                wanted - len({*here, *self.holders.get(part, ())} - self.late.difference(here))
            )
        return found

    @property
    def awaited(self) -> list[str]:
        """List the sessions whose results are expected."""
        waits = ((part, s) for part, asked in self.holders.items() for s in asked if s not in self.late)
        return [s for part, s in waits if s not in self._of(part)]

    @property
    def whole(self) -> bool:
        return all(self.result(part) is not None for part in range(self.parts))

    def overdue_at(self, longest: float) -> float:
        """Return until when results are awaited. `longest`: seconds, where there is none to compare with."""
        if not self.awaited:
            return inf
        return self.began + (longest if self.quickest is None else max(PATIENCE_S, PATIENCE * self.quickest))

    def outliers(self) -> list[str]:
        """List the sessions whose results differ from those that count."""
        found = list[str]()
        for part in range(self.parts):
            counts = self.result(part)
            if counts is not None:
                found += [s for s, m in self._of(part).items() if not agree(mean_of(m), mean_of(counts))]
        return found

    @property
    def _counted(self) -> list[messages.Evaluated]:
        # by part, never by arrival: float sums depend on order
        found = (self.result(part) for part in range(self.parts))
        return [m for m in found if m is not None]

    @property
    def tokens(self) -> int:
        return sum(m.tokens for m in self._counted)

    @property
    def figures(self) -> tuple[float, ...]:
        """Average the objective's further figures; empty where it has none."""
        return mean_columns({str(m.part): (m.figures, m.tokens) for m in self._counted})

    @property
    def loss(self) -> float:
        """Compute the mean over the tokens; nan where there are none."""
        total = sum(m.loss_sum for m in self._counted)
        return total / self.tokens if self.tokens else float("nan")


class Evaluations:
    """Evaluations of a run: the one under way, and when the next is due."""

    def __init__(self, wanted: bool, every: int, last: EvaluationRow | None = None) -> None:
        self.wanted, self.every = wanted, every  # every: steps; 0: only the first and the final one
        self.finished = last is not None and last.final  # the final one is done
        self.now: Evaluation | None = None
        self._last_step = last.step if last else -1
        self._repeats, self._opinions = 0, PAIR

    def due(self, step: int) -> bool:
        if not self.wanted or self.now is not None:
            return False
        return self._last_step < 0 or (self.every > 0 and step // self.every > self._last_step // self.every)

    def begin(self, ev: Evaluation, keys: Mapping[str, str]) -> None:
        """Begin an evaluation in which each of these sessions (-> key) computes one part.

        `ev`: its round, step, time and reference.
        """
        sessions, several = spread(keys), len(set(keys.values())) > 1
        ev.opinions = min(self._opinions, len(sessions)) if several else 1
        ev.parts = max(1, len(sessions) // ev.opinions)
        ev.last = self.repeated or len(sessions) < THIRD
        for number, session in enumerate(sessions):
            ev.holders.setdefault(number % ev.parts, []).append(session)
        self.now, self._last_step = ev, ev.step

    def assign(self, ev: Evaluation, keys: Mapping[str, str]) -> list[str]:
        """Assign missing parts of the final evaluation to free sessions (-> key). Returns those that got one.

        `ev`: as for `begin`; used where none is under way.
        """
        if self.now is None and keys:
            self.begin(ev, keys)
            return [session for asked in ev.holders.values() for session in asked]
        given = list[str]()
        if self.now is not None:
            free = [*spread(keys)]
            for part in self.now.missing:
                others = [s for s in free if s not in self.now.holders.get(part, ())]
                if others:
                    free.remove(others[0])
                    self.now.holders.setdefault(part, []).append(others[0])
                    given.append(others[0])
        return given

    @property
    def repeated(self) -> bool:
        """True where an evaluation was given up so often that this one counts, whatever is missing."""
        return self._repeats >= REPEATS

    def lost(self, session: str) -> None:
        if self.now is not None and self.now.lost(session) and not self.now.final:
            if self.repeated:
                self.now.closed = True
            else:
                self.again()

    def again(self, *, disputed: bool = False) -> None:
        """Give up the evaluation under way; the next round begins another."""
        if self.now is not None:
            self._repeats += 1
            self._opinions = THIRD if disputed else self._opinions
            self.now, self._last_step = None, -1

    def finish(self) -> None:
        """End the evaluation under way: it is whole, or void."""
        if self.now is not None:
            self.finished = self.now.final
            self.now = None
        self._repeats, self._opinions = 0, PAIR


def spread(keys: Mapping[str, str]) -> Sequence[str]:
    """Order sessions so that those of one key follow each other: they get different parts then."""
    return sorted(keys, key=lambda session: keys[session])
