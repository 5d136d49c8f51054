"""A standby traces the model and hashes the data once: opening the hub does neither again."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cocktail_cli.host import RunDelegate, settings_of
from recipes.algorithm import compressor_of, handoff_compressor
from recipes.config import load_recipe
from recipes.models import prepare_base


class Rows(list[Any]):
    """A corpus whose digest is asked for once."""

    held_out, asked = (), 0

    def pack_held_out(self) -> bytes:
        return b""

    def costs(self, width: int) -> None:
        """All cost the same."""

    def digest(self) -> str:
        self.asked += 1
        return f"digest {self.asked}"


def test_who_is_ready_traces_no_model_and_reads_no_data_when_the_hub_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("smoke", [])
    base = prepare_base(recipe, tmp_path / "base")
    usual, ready = (RunDelegate(recipe, base, Rows(range(64)), tmp_path / name) for name in ("a", "b"))  # type: ignore[arg-type]
    settings = settings_of(usual, "amber-otter-42")
    assert settings.needs["memory"] > 1e6
    _ = ready.memory, ready.prepared, ready.data_digest
    monkeypatch.setattr("recipes.planning.plan_memory", lambda *_: pytest.fail("the model is traced"))

    assert settings_of(ready, "amber-otter-42").needs == settings.needs
    assert (ready.data_digest, ready.data_digest) == ("digest 1", "digest 1")
    for work in (usual, ready):
        work.close()


@pytest.mark.parametrize("overrides", [[], ["compression.uncompressed_steps=2"]])
def test_no_peer_uploads_more_than_its_longest_packet_and_what_a_leaver_hands_over(
    tmp_path: Path, overrides: list[str]
) -> None:
    recipe = load_recipe("smoke", overrides)
    base = prepare_base(recipe, tmp_path / "base")
    with closing(RunDelegate(recipe, base, Rows(range(64)), tmp_path / "ledger")) as work:  # type: ignore[arg-type]
        limit = settings_of(work, "amber-otter-42").update_limit
        mix, noise = compressor_of(recipe.compression), torch.randn(work.parameters)
        rest = handoff_compressor(mix, 1.0)
        sent = [
            mix.at(0).encode(noise[: mix.draw(work.parameters, 1, 0).m]).packet,
            rest.encode(noise).packet,
        ]

    assert max(map(len, sent)) <= limit
    assert limit < 8 * work.parameters, "an index and a number in float32 of each parameter"
