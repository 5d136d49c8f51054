"""A host passes neither the files of a gated base on nor snapshots that contain its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cocktail_cli.host import RunDelegate, settings_of
from recipes.config import load_recipe
from recipes.downloads import Licence
from recipes.models import Base, prepare_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return prepare_base(load_recipe("smoke"), tmp_path_factory.mktemp("made") / "base")


@pytest.mark.parametrize(
    ("gated", "lora", "snapshots"),
    [(False, False, True), (True, False, False), (True, True, True)],
    ids=["open", "gated", "adapters of a gated base"],
)
def test_a_gated_base_is_announced_by_its_hashes_and_not_served(
    base: Base, tmp_path: Path, gated: bool, lora: bool, snapshots: bool
) -> None:
    class Rows(list[Any]):
        """A corpus of which nothing is asked but its length."""

        held_out = ()

        def pack_held_out(self) -> bytes:
            return b""

        def costs(self, width: int) -> None:
            """All cost the same."""

    recipe = load_recipe("smoke", ["lora.lora_r=4"] if lora else [])
    kept = replace(base, licence=Licence("llama3.1", gated=gated))
    work = RunDelegate(recipe, kept, Rows(range(64)), tmp_path / "ledger")  # type: ignore[arg-type]
    settings = settings_of(work, "amber-otter-42")

    assert {file.gated for file in settings.base} == {gated}
    assert [file.sha256 for file in settings.base] == [file.sha256 for file in base.files]
    assert settings.licence == "llama3.1"
    assert work.serves_snapshots is snapshots
    for name in ("base/model.safetensors", "hashes/base/model.safetensors"):
        if gated:
            with pytest.raises(KeyError):
                work.object(name)
        else:
            assert work.object(name)
    work.close()
