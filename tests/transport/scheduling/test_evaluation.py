"""Evaluations: sums of the peers' parts, whatever their order of arrival."""

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.ledger import EvaluationRow, Ledger
from transport.protocol import messages
from transport.scheduling.figures import PATIENCE, Evaluation, Evaluations, agree, mean_columns


def begun(keys: dict[str, str], reference: float | None = 2.0, *, final: bool = False) -> Evaluations:
    """Begin an evaluation of round 3 with these sessions, session -> key."""
    made = Evaluations(True, 0)
    made.begin(Evaluation(3, 3, 0, final, reference=reference), keys)
    return made


def under_way(made: Evaluations) -> Evaluation:
    assert made.now is not None
    return made.now


def said(part: int, mean: float, tokens: int = 2, figures: list[float] | None = None) -> messages.Evaluated:
    return messages.Evaluated(3, part, mean * tokens, tokens, figures or [])


def test_further_figures_are_means_over_the_terms_of_all_parts() -> None:
    ev = Evaluation(3, 3, 2, False, holders={0: ["s-ann"], 1: ["s-bob"]})
    assert ev.arrived("s-bob", messages.Evaluated(3, 1, 0.5, 1, [4.0, -4.0, 0.0]))
    assert ev.arrived("s-ann", messages.Evaluated(3, 0, 1.5, 3, [3.0, 0.0, 3.0]))

    assert (ev.loss, ev.tokens) == (0.5, 4)
    assert ev.figures == (1.25, -2.5, 0.75), (
        "what is further from the middle one counts as the end of its range"
    )


@pytest.mark.parametrize(
    "parts", [{}, {"a": ([], 4)}, {"a": ([1.0] * 3, 2), "b": ([], 2)}, {"a": ([1.0] * 3, 0)}]
)
def test_there_are_none_where_a_peer_has_sent_none(parts: dict[str, tuple[list[float], int]]) -> None:
    assert mean_columns(parts) == ()


# ---- several opinions --------------------------------------------------------------------------------------


def test_a_part_is_computed_by_two_keys_and_by_one_where_all_are_one_persons() -> None:
    strangers = under_way(begun({"a": "k1", "b": "k2", "c": "k3", "d": "k4"}))
    own = under_way(begun({"a": "k", "b": "k", "c": "k", "d": "k"}))
    mixed = under_way(begun({"a": "k", "b": "k", "c": "x", "d": "y"}))

    assert (strangers.parts, strangers.opinions) == (2, 2)
    assert (own.parts, own.opinions) == (4, 1)
    assert all(len({"a", "b"} & set(asked)) == 1 for asked in mixed.holders.values()), (
        "no part by one key alone"
    )


@given(st.floats(-1e30, 1e30), st.floats(0.5, 10.0), st.booleans())
def test_of_three_the_middle_one_counts_whatever_one_of_them_says(
    lie: float, truth: float, final: bool
) -> None:
    made = begun({"a": "k1", "b": "k2", "c": "k3"}, None, final=final)
    for session, mean in (("a", truth), ("b", lie), ("c", truth)):
        assert under_way(made).arrived(session, said(0, mean))

    assert under_way(made).whole
    assert under_way(made).loss == pytest.approx(truth)
    assert under_way(made).outliers() == ([] if agree(lie, truth) else ["b"])


def test_of_two_who_disagree_a_third_decides_in_the_last_evaluation() -> None:
    made = begun({"a": "k1", "b": "k2", "c": "k3", "d": "k4"}, final=True)
    ev = under_way(made)
    first, second = ev.holders[0]
    ev.arrived(first, said(0, 2.0))
    ev.arrived(second, said(0, -1e30))
    for session in ev.holders[1]:
        ev.arrived(session, said(1, 2.0))
    assert not ev.whole

    third = [s for s in ("a", "b", "c", "d") if s not in (first, second)]
    assert made.assign(Evaluation(3, 3, 0, True), dict.fromkeys(third, "k")) == third[:1]
    ev.arrived(third[0], said(0, 2.01))
    assert (ev.whole, ev.outliers()) == (True, [second])
    assert ev.loss == pytest.approx(2.0, abs=0.01)


def test_where_there_is_no_third_the_one_nearer_to_the_runs_last_loss_counts() -> None:
    for lie in (-1e30, 0.0, 1e30):
        ev = under_way(begun({"a": "k1", "b": "k2"}, 2.2))
        ev.arrived("a", said(0, lie))
        assert not ev.whole, "no single peer's number is the run's"
        ev.arrived("b", said(0, 2.0))

        assert (ev.whole, ev.loss, ev.outliers()) == (True, 2.0, ["a"])


def test_an_evaluation_that_nobody_delivers_is_not_awaited_for_ever() -> None:
    ev = under_way(begun({"a": "k1", "b": "k2", "c": "k3", "d": "k4"}))
    assert ev.overdue_at(600.0) == 600.0
    ev.arrived(ev.holders[0][0], said(0, 2.0), now=20.0)
    assert ev.overdue_at(600.0) == PATIENCE * 20.0
    for part in (0, 1):
        for session in ev.holders[part]:
            ev.arrived(session, said(part, 2.0), now=21.0)
    assert ev.overdue_at(600.0) == inf


def test_a_ledger_keeps_them(tmp_path: Path) -> None:
    row = EvaluationRow(1, 1, 0.5, 4, False, (1.0, -1.0, 0.75))
    with Ledger(tmp_path, run="toy", samples=40) as ledger:
        ledger.evaluated(row)
        assert ledger.evaluations() == [row]
