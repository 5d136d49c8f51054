from pathlib import Path
from typing import Any

import pytest
from in_process import recipe_of, save_tiny
from test_spread_peer import LEASE, lease

from cocktail_cli.assembly import model_extensions
from recipes.models import load_model
from recipes.training import build_peer

pytestmark = pytest.mark.slow


def test_two_ranks_sketch_what_one_sketches(ranks: Any, tmp_path: Path, data: Path) -> None:
    """A rank without a micro-batch adds nothing."""
    audited = {"audits": {"audit_share": 0.1}}
    recipe = recipe_of(save_tiny("gpt_neox", tmp_path / "model"), data, **audited)
    alone = build_peer(load_model(tmp_path / "model"), recipe, 2)
    alone.trainer.extensions = model_extensions(recipe)
    two = ranks.build(recipe, tmp_path / "model", None, 2)
    found = []
    for peer in (two, alone):
        peer.trainer.zero()
        groups = [lease()[:2], lease()[2:3]] if peer is two else [[part] for part in lease()[:3]]
        found.append("".join(peer.trainer.backward(group, 9, 3).notes["audits"] for group in groups))

    assert len(found[0]) == 2 * 16 * LEASE
    assert (int(found[0], 16) ^ int(found[1], 16)).bit_count() <= 6
