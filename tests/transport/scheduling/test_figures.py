"""No single peer's number is a figure of the run: what cannot be is dropped, what is odd is bounded."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from transport.protocol import messages
from transport.scheduling import round_figures
from transport.scheduling.figures import (
    WIDE,
    WIDEST,
    bounded_mean,
    middle_norm,
    possible_report,
    why_impossible,
)

BOUNDS = ((0.0, 100.0),)
HONEST = {"ann": (300.0, 100, ()), "bob": (310.0, 100, ()), "cem": (290.0, 100, ())}
COUNTED = dict.fromkeys(["ann", "bob", "cem", "eve"], 100)


@pytest.mark.parametrize(
    "lie",
    [(-1e30, 100, ()), (1e30, 100, ()), (nan, 100, ()), (inf, 100, ()), (300.0, 2**40, ()), (-8e27, 100, ())],
)
def test_what_cannot_be_is_no_part_of_a_rounds_loss_and_is_named(lie: tuple[float, int, tuple[()]]) -> None:
    found = round_figures({**HONEST, "eve": lie}, COUNTED, BOUNDS, 3.0)
    assert found.loss == pytest.approx(3.0)
    assert [*found.impossible] == ["eve"]


@given(st.floats(0, 100), st.one_of(st.none(), st.floats(2, 4)))
def test_a_lie_within_bounds_moves_the_loss_by_the_range_around_the_middle_at_most(
    lie: float, before: float | None
) -> None:
    found = round_figures({**HONEST, "eve": (100 * lie, 100, ())}, COUNTED, BOUNDS, before)
    assert found.loss is not None
    assert abs(found.loss - 3.0) <= WIDE * 3.2 / 4 + 0.1


@given(st.lists(st.tuples(st.floats(2.9, 3.1), st.integers(1, 1000)), min_size=1, max_size=9))
def test_of_honest_peers_it_is_the_exact_mean(parts: list[tuple[float, int]]) -> None:
    said = {f"p{n}": (mean * terms, float(terms)) for n, (mean, terms) in enumerate(parts)}
    exact = sum(total for total, _ in said.values()) / sum(terms for _, terms in said.values())
    assert bounded_mean(said, 3.0) == pytest.approx(exact)


def test_one_of_two_has_the_last_figure_against_it() -> None:
    found = bounded_mean({"ann": (300.0, 100.0), "eve": (9000.0, 100.0)}, 3.0)
    assert found == pytest.approx((3.0 + 3.0 + WIDE * 3.0) / 2)


@given(st.lists(st.floats(2.9, 3.1), min_size=30, max_size=60), st.floats(0, 1e30))
def test_a_lie_that_is_repeated_beside_one_honest_peer_gets_no_further(
    honest: list[float], lie: float
) -> None:
    """Of an agreed range nobody can tell which of two lies; what is out of it is held to it for ever."""
    loss, norm = 3.0, 3.0
    for said in honest:
        found = bounded_mean({"ann": (said, 1.0), "eve": (lie, 1.0)}, loss)
        size = middle_norm([said, lie], norm)
        assert found is not None
        assert size is not None
        assert 3.0 / 2 <= found <= 3.0 * 3 / 2
        assert 3.0 / WIDEST <= size <= 3.1 * (1 + WIDEST) / 2
        loss, norm = found, size


def test_a_run_of_peers_that_tell_nothing_has_no_loss() -> None:
    assert round_figures({}, {}, BOUNDS, 3.0).loss is None
    assert bounded_mean({}, None) is None
    assert middle_norm([], 1.0) is None


@pytest.mark.parametrize("lie", [5e29, 1e-30])
def test_a_norm_is_within_ten_times_the_middle_one(lie: float) -> None:
    alone = middle_norm([lie], 0.5)
    among = middle_norm([0.4, 0.5, lie], 0.5)
    assert alone is not None
    assert among is not None
    assert 0.5 / WIDEST <= alone <= 0.5 * WIDEST
    assert among in (0.4, 0.5)


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        ({"compute_s": 1e-30}, "compute"),
        ({"compute_s": 1e9}, "compute"),
        ({"compute_s": -1.0}, "compute"),
        ({"wait_s": 1e9}, "waiting"),
        ({"grad_norm": -1.0}, "gradient"),
    ],
)
def test_seconds_that_have_not_passed_and_norms_below_zero_are_dropped(
    change: dict[str, float], dropped: str
) -> None:
    honest = messages.Report(1, 7, [0], 3.0, 10, compute_s=0.5, wait_s=0.1, grad_norm=1.0)
    kept, wrong = possible_report(honest, 2.0)
    assert (kept, wrong) == (honest, [])
    kept, wrong = possible_report(replace(honest, **change), 2.0)
    assert [what for what in wrong if dropped in what]
    assert getattr(kept, next(iter(change))) == 0.0


def test_further_figures_are_as_many_as_the_objective_has_and_within_its_bounds() -> None:
    bounds = (*BOUNDS, (-inf, inf), (-inf, inf), (0.0, 1.0))
    said = {
        "ann": (10.0, 10, (1.0, 2.0, 5.0)),
        "bob": (10.0, 10, (1.0, 2.0)),
        "eve": (10.0, 10, (1.0, 2.0, 11.0)),
    }
    found = round_figures(said, dict.fromkeys(said, 10), bounds, None)
    assert found.impossible == {
        "bob": "2 figures beside the loss, where there are 3",
        "eve": "a figure of 1.1, which is not within 0 and 1",
    }
    assert found.further == pytest.approx((0.1, 0.2, 0.5))
    assert round_figures(said, dict.fromkeys(said, 10), BOUNDS, None).impossible.keys() == said.keys()


def test_an_impossible_sum_is_said_in_words() -> None:
    assert why_impossible((300.0,), 100, 100, BOUNDS) == ""
    assert "100 terms of the loss, where its samples have 50" in why_impossible((300.0,), 100, 50, BOUNDS)
    assert "not within 0 and 100" in why_impossible((-1e30,), 100, 100, BOUNDS)
