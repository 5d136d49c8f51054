"""Evaluations: sums of the peers' parts, whatever their order of arrival."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_run_ledger import as_older

from transport.ledger import EvaluationRow, Ledger
from transport.protocol import messages
from transport.scheduling.evaluation import Evaluation, mean_rewards


def test_rewards_are_means_over_the_pairs_of_all_peers() -> None:
    ev = Evaluation(3, 3, 2, False, {0: "s-ann", 1: "s-bob"})
    assert ev.arrived("s-bob", messages.Evaluated(3, 1, 0.5, 1, [4.0, -4.0, 0.0]))
    assert ev.arrived("s-ann", messages.Evaluated(3, 0, 1.5, 3, [0.0, 0.0, 3.0]))

    assert (ev.loss, ev.tokens) == (0.5, 4)
    assert ev.rewards == (1.0, -1.0, 0.75)


@pytest.mark.parametrize("parts", [[], [([], 4)], [([1.0, 1.0, 1.0], 2), ([], 2)], [([1.0, 1.0, 1.0], 0)]])
def test_there_are_none_where_a_peer_has_sent_none(parts: list[tuple[list[float], int]]) -> None:
    assert mean_rewards(parts) == ()


def test_a_ledger_keeps_them_and_one_of_an_older_version_opens_without(tmp_path: Path) -> None:
    row = EvaluationRow(1, 1, 0.5, 4, False, (1.0, -1.0, 0.75))
    with Ledger(tmp_path, run="toy", samples=40) as ledger:
        ledger.evaluated(row)
        assert ledger.evaluations() == [row]
    as_older(tmp_path, "DROP TABLE chain; ALTER TABLE evaluations DROP COLUMN rewards")
    with Ledger(tmp_path, write=False) as ledger:
        assert ledger.evaluations() == [EvaluationRow(1, 1, 0.5, 4, False)]
    with Ledger(tmp_path, run="toy", samples=40) as ledger:
        ledger.evaluated(row)
        assert ledger.evaluations() == [row]
