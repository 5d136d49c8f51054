"""A peer's private rows in a run: what is spent and where that stands, that it stops, what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from own_host import EXACT, Hosted, flat, hosted
from private_peer import adapted, loss_of, rows_like, train
from torch import nn
from torch.utils.data import DataLoader

import cocktail_cli
from cocktail_cli.assembly import recipe_type, with_figures
from cocktail_cli.errors import Failure
from cocktail_cli.extensions.privacy import PrivateRows, extension
from cocktail_cli.extensions.privacy.budget import Budget, path_of
from cocktail_cli.extensions.privacy.keys import Keys
from cocktail_cli.host import CommittedModel
from cocktail_cli.machine import home
from recipes.config import load_recipe
from recipes.errors import RecipeError
from transport.protocol import CurveKeys, RunURL

TERMS = {"epsilon": 4.0, "delta": 1e-4}


def private(folder: Path, steps: int = 12, settings: Any = None, terms: dict[str, float] = TERMS) -> Any:
    """Host a run whose peers have private rows."""
    training = {"max_steps": steps, "global_batch_size": 20}
    return hosted(folder, adapted(), settings, training=training, privacy=terms, compression=EXACT)


@pytest.mark.slow
def test_what_is_spent_stands_in_status_receipt_and_card_and_no_loss_leaves(tmp_path: Path) -> None:
    seen: list[Budget] = []
    with private(tmp_path) as run:
        found, swarm = train(run.url, each=lambda swarm: seen.append(swarm._budget))
        run.wait()
        (book,) = (one for one in run.hub._state.rounds.extensions if one.name == "privacy")
        status = with_figures(dict(book.status()))
        spent = f"epsilon {seen[0].epsilon:.3g} of 4 at delta 0.0001"

        assert swarm.reason == "all steps are done"
        assert torch.equal(flat(found), run.folded())
        assert run.hub._state.rounds.history.loss is None
        assert status["privacy"]["spent"] == {"ann": pytest.approx(seen[0].epsilon)}
        assert f"spent: ann {seen[0].epsilon:.3g}" in next(iter(extension.above_peers(status)))
        (tmp_path / "tokenizer").mkdir()
        CommittedModel(run.recipe, run.base.folder, tmp_path).write_model(tmp_path / "out")
        again = extension.hub(run)(None)  # the book of a hub that is started again

    assert seen[0].steps == 12
    assert 3.0 < seen[0].epsilon <= 4.0
    assert again.spent == status["privacy"]["spent"]
    assert f"- ann: {spent}" in (tmp_path / "out" / "README.md").read_text()
    (receipt,) = (home() / "receipts").glob("*.json")
    assert json.loads(receipt.read_text())["statement"]["said"] == f"ann: {spent}"


@pytest.mark.slow
def test_a_peer_stops_by_itself_once_its_budget_is_spent_and_does_not_begin_anew(tmp_path: Path) -> None:
    """The other peer goes on; nothing of the one that has stopped is lost."""
    with private(tmp_path, steps=60, settings={"first_peers": 2}) as run:
        before = Budget(path_of(run.url.run, "ann"), Keys(**TERMS), 20 / 200, 65)
        for _ in range(60):  # in a session that has crashed
            before.spend()
        before.close()
        other = threading.Thread(target=train, args=(run.url,), kwargs={"name": "bob"})
        other.start()
        taken: list[int] = []
        _, swarm = train(run.url, each=lambda swarm: taken.append(1))

        assert swarm.reason.startswith("privacy budget spent: epsilon")
        assert 4 <= len(taken) <= 6
        run.until(lambda: run.left("ann"))
        assert "privacy budget spent" in run.left("ann")[0]
        with pytest.raises(Failure, match="the privacy budget of these rows is spent: epsilon"):
            train(run.url)
        run.wait(120)
        other.join(120)


# ---- what is refused ---------------------------------------------------------------------------------------


def rejected(run: Hosted, join: Callable[[], Any], said: str) -> Failure:
    with pytest.raises(Failure, match=said) as met:
        join()
    return met.value


@pytest.mark.slow
def test_loops_and_runs_that_do_not_agree_on_privacy_are_refused(tmp_path: Path) -> None:
    """A loop of one's own draws its batches itself; a delta that publishes a row is no privacy."""
    model = adapted()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    few = PrivateRows(rows_like(50), loss_of, 5)
    with private(tmp_path / "private", 1000, terms={"epsilon": 4.0, "delta": 0.02}) as run:

        def own_loop() -> None:
            with cocktail_cli.join_with(str(run.url), model, optimizer):
                pytest.fail("it joined")

        met = rejected(run, own_loop, "a loop that draws its own batches and adds no noise is refused")
        assert "join_privately" in met.hints[0]
        met = rejected(run, lambda: train(run.url, few), r"delta 0\.02 .* permits to publish one of 50 rows")
        assert met.hints == ("a delta below 0.02, or more rows",)
    with hosted(tmp_path / "plain", adapted(), training={"max_steps": 1000}) as run:
        rejected(run, lambda: train(run.url), "this run has no section `privacy:`")


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64).requires_grad_(False), nn.BatchNorm1d(64), nn.Linear(64, 2))


@pytest.mark.parametrize(
    ("rows", "model", "said"),
    [
        (DataLoader(rows_like(8)), adapted(), "rows come from a DataLoader, which draws them in its own"),
        (iter(rows_like(8)), adapted(), "rows come from a list_iterator"),
        (rows_like(8), normalized(), "1 is batch normalization, which mixes rows"),
        (rows_like(8), adapted().requires_grad_(), "the model trains 178 of its 178 parameters"),
        (rows_like(3), adapted(), "batch_size 4 of 3 rows"),
    ],
    ids=["loader", "iterator", "batch-norm", "whole", "batch"],
)
def test_rows_and_models_that_cannot_be_private_are_refused_before_the_run_is_dialled(
    rows: Any, model: nn.Module, said: str
) -> None:
    with pytest.raises(Failure, match=said):
        train("cocktail://unused", PrivateRows(rows, loss_of, 4), model)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (rows_like(8), "rows is a list, expected PrivateRows"),
        (PrivateRows(rows_like(8), loss_of, 4, at_once=-1), "at_once -1 of 8 rows"),
        (PrivateRows(rows_like(8), loss_of, cast(Any, 1.5)), "batch_size 1.5 of 8 rows"),
        (PrivateRows(rows_like(8), cast(Any, None), 4), "loss_of is a NoneType"),
    ],
)
def test_what_are_no_private_rows_is_refused(rows: Any, said: str) -> None:
    with pytest.raises(Failure, match=said):
        train("cocktail://unused", rows)


def test_a_private_swarm_outside_of_its_block_is_one_error() -> None:
    model, rows = adapted(), PrivateRows(rows_like(8), loss_of, 4)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=1.0)
    url = RunURL(CurveKeys.generate().public, "t" * 22, "127.0.0.1", 1, "run")
    swarm = cocktail_cli.join_privately(str(url), model, optimizer, rows)

    with pytest.raises(Failure, match="the run is not joined"):
        swarm.step()


def test_batch_normalization_that_does_not_learn_mixes_nothing() -> None:
    model = normalized()
    model[1].eval().requires_grad_(False)

    PrivateRows(rows_like(8), loss_of, 4).check(model)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("privacy.epsilon=0", "must be above 0, not 0"),
        ("privacy.delta=1", "must be below 1, not 1"),
        ("privacy.max_row_norm=-1", "must be above 0, not -1"),
    ],
)
def test_a_budget_that_is_none_is_refused(override: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("own-loop", [override], extend=recipe_type)


def test_rows_that_a_hub_leases_are_not_private() -> None:
    with pytest.raises(RecipeError, match="what a hub leases it knows already"):
        load_recipe("smoke", ["privacy.epsilon=8"], extend=recipe_type)
