"""The budget of a peer's rows: opacus' figure, on disk before a step is seen, for one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.privacy.budget import Budget, path_of
from cocktail_cli.extensions.privacy.keys import Keys

TERMS = Keys(epsilon=2.0, delta=1e-5)


def spend_all(budget: Budget, most: int = 1000) -> int:
    taken = 0
    while not budget.spent and taken < most:
        budget.spend()
        taken += 1
    return taken


@pytest.mark.slow
def test_what_is_spent_is_what_opacus_says_of_the_same_schedule(tmp_path: Path) -> None:
    """Also of one whose rate has changed on the way."""
    from opacus.accountants import RDPAccountant

    budget = Budget(tmp_path / "b.json", TERMS, 0.1, 50)
    assert budget.epsilon == 0.0
    for _ in range(20):
        budget.spend()
    budget.close()
    other = Budget(tmp_path / "b.json", TERMS, 0.2, 100)
    for _ in range(5):
        other.spend()

    theirs = RDPAccountant()
    for noise, rate, count in ((budget.noise, 0.1, 20), (other.noise, 0.2, 5)):
        for _ in range(count):
            theirs.step(noise_multiplier=noise, sample_rate=rate)
    assert other.epsilon == pytest.approx(theirs.get_epsilon(TERMS.delta), rel=1e-12)
    assert other.steps == 25


@pytest.mark.slow
def test_a_budget_lasts_as_many_steps_as_were_planned_also_across_restarts(tmp_path: Path) -> None:
    first = Budget(tmp_path / "b.json", TERMS, 0.1, 40)
    assert spend_all(first, 15) == 15
    first.close()
    second = Budget(tmp_path / "b.json", TERMS, 0.1, 40)

    assert second.epsilon == pytest.approx(first.epsilon)
    assert 40 <= 15 + spend_all(second) <= 41  # the noise is found to a hundredth of an epsilon
    assert 1.9 < second.epsilon <= 2.0
    second.close()
    assert Budget(tmp_path / "b.json", TERMS, 0.1, 40).spent


@pytest.mark.slow
def test_two_processes_do_not_spend_one_budget(tmp_path: Path) -> None:
    mine = Budget(tmp_path / "b.json", TERMS, 0.1, 40)

    with pytest.raises(Failure, match="another process trains on the rows of this name"):
        Budget(tmp_path / "b.json", TERMS, 0.1, 40)
    mine.close()
    Budget(tmp_path / "b.json", TERMS, 0.1, 40).close()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[[1.0, 0.1]]", '{"spent": 0}', "[[1.0, 0.1, null]]"])
def test_a_file_that_does_not_say_what_is_spent_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.json").write_text(text)

    with pytest.raises(Failure, match="does not say what these rows have spent"):
        Budget(tmp_path / "b.json", TERMS, 0.1, 40)


@pytest.mark.slow
def test_a_budget_that_no_noise_is_enough_for_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"epsilon 0\.05 at delta 1e-05: no noise is enough"):
        Budget(tmp_path / "b.json", Keys(epsilon=0.05, delta=1e-5), 0.5, 40)


def test_an_install_without_opacus_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocktail_cli.extensions.privacy.budget.find_spec", lambda name: None)

    with pytest.raises(Failure, match=r"opacus, .* is not installed") as met:
        Budget(tmp_path / "b.json", TERMS, 0.1, 40)

    assert "opacus" in met.value.hints[0]


def test_a_name_of_a_hub_leads_nowhere_else(tmp_path: Path) -> None:
    """The file's name is a digest: another run or peer has another, whatever it is called."""
    paths = {path_of(run, peer) for run in ("a", "../b") for peer in ("ann", "../../bob")}

    assert len(paths) == 4
    assert len({path.parent for path in paths}) == 1
