"""`logging.loss_watchdog_threshold`: a run that has diverged is ended, and not for one bad round."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_narrator import committed

from cocktail_cli.errors import Failure
from cocktail_cli.host import HostSession, LocalPeers, LocalSettings
from recipes.config import load_recipe
from transport.protocol import RunEnded

NAN = float("nan")


def followed(tmp_path: Path, losses: list[float | None], *overrides: str) -> object:
    """Follow a hub that commits rounds with these losses, and then ends."""
    rounds = [committed(round=i, loss=loss) for i, loss in enumerate(losses)]
    hub: Any = SimpleNamespace(events=lambda tick: iter([*rounds, RunEnded(0.0, True, "over", 0, 9, 9)]))
    silent: Any = SimpleNamespace(
        tell=lambda _: (), events=tuple, committed=lambda *_: None, present=(), met=(), rounds=0
    )
    nobody = LocalPeers(tmp_path, LocalSettings())
    return HostSession(load_recipe("smoke", list(overrides)), tmp_path, []).follow(
        hub, silent, nobody, silent
    )


@pytest.mark.parametrize("losses", [[9, 9, 9], [1, 9, None, 9, 9, 1], [9, NAN, NAN]])
def test_a_loss_that_stays_above_its_threshold_ends_the_run_without_result(
    tmp_path: Path, losses: list[float | None]
) -> None:
    with pytest.raises(Failure, match="above loss_watchdog_threshold 5 for 3 rounds") as caught:
        followed(tmp_path, losses, "loss_watchdog_threshold=5")

    assert caught.value.exit == 7


@pytest.mark.parametrize("losses", [[9, 9, 1, 9, 9], [5, 5, 5], [None, None, None]])
def test_a_loss_that_comes_down_in_time_does_not(tmp_path: Path, losses: list[float | None]) -> None:
    assert isinstance(followed(tmp_path, losses, "loss_watchdog_threshold=5"), RunEnded)
    assert isinstance(followed(tmp_path, [9] * 9), RunEnded)
