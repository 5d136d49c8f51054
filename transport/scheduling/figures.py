"""Figures of a run from what its peers say: no single peer's number is one of them.

A number that cannot be is dropped: a loss outside the bounds that the objective states, terms that are not
those of the leases, seconds that have not passed. What is left enters a mean within a range around the middle
one; of two, around the one nearer to the run's last figure. So where all are honest the figure is their exact
mean, and a lie moves it by the width of that range times its sender's weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import isfinite
from statistics import median, median_high, median_low

from msgspec.structs import replace

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
