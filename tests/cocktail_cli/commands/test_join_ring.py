"""`join --ring` refuses a run of which several machines cannot be a peer, before one of them joins it."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_swarm import ToyWork, toy_settings

from cocktail_cli.commands.run.join import check_run
from cocktail_cli.volunteer.limits import VolunteerLimits
from recipes.config import load_recipe
from recipes.errors import ModelError
from transport import Hub, Ledger, RunKeys, ask_status


@pytest.mark.parametrize(
    ("refused", "overrides"),
    [
        ("compression.shards other than layers", ()),
        ("swarm.audit_share", ("compression.shards=layers", "swarm.audit_share=0.1")),
        ("", ("compression.shards=layers",)),
    ],
)
def test_a_ring_is_refused_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, overrides: tuple[str, ...]
) -> None:
    """A real hub over a real socket, which has seen nobody in the end."""
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path / "home"))
    recipe = load_recipe("smoke", list(overrides)).to_json()
    settings, keys = toy_settings(min_peers=9, recipe=recipe), RunKeys.generate()
    with Ledger(tmp_path, run=settings.run, samples=settings.samples) as ledger:
        hub = Hub(("127.0.0.1", 0), keys, ledger, settings, ToyWork())
        hub.start()
        try:
            url = keys.url("127.0.0.1", hub.port, settings.run)
            limits = VolunteerLimits("ann", ["cpu"])
            if refused:
                with pytest.raises(ModelError, match=refused):
                    check_run(url, limits, 5.0)
            else:
                check_run(url, limits, 5.0)
            assert ask_status(url)["peers"] == []
        finally:
            hub.stop(now=True)
            hub.join(10.0)
