"""The loss that `plan` expects is what the study's cells say, and it says where they do not reach."""

from dataclasses import replace

import pytest

from cocktail_cli.extensions.plan.measured_loss import MEASURED, expected_loss
from recipes.config import load_recipe
from scripts.study.cells import Found, shipped
from scripts.study.plan import ADAPTERS, COCKTAIL, REFERENCE, SEEDS, SHORT, SPARSEST, SUM, WIDE
from scripts.study.train import Setting, Size

STUDIED = {
    "cocktail": SUM,
    "cocktail-paper": COCKTAIL,
    "cocktail-wide": WIDE,
    "cocktail-thin": SPARSEST,
    "lora-cocktail": ADAPTERS,
}


def lowest(found: Found, setting: Setting) -> float:
    return min(o.loss for c, o in found.items() if c.setting == setting and c.seed == SEEDS[0])


@pytest.mark.parametrize("name", MEASURED)
def test_a_row_is_what_its_cells_say(name: str) -> None:
    row, setting = MEASURED[name], STUDIED[name]
    found = shipped(SHORT if setting.lora else Size())
    for peers, over in row.over.items():
        dense = lowest(found, replace(REFERENCE.setting, lora=setting.lora))
        assert lowest(found, replace(setting, peers=peers)) / dense - 1 == pytest.approx(over, abs=1e-4)
    assert row.steps == (SHORT if setting.lora else Size()).steps


@pytest.mark.parametrize(
    ("recipe", "words", "over"),
    [
        ("smoke", [], 0.0018),
        ("smoke", ["compression.preset=cocktail-wide"], 0.0009),
        ("smoke", ["lora.lora_r=4"], 0.0012),
        ("smoke", ["compression.topk_ratio=0.1"], None),
        ("smoke", ["compression.preset=local-sgd"], None),
    ],
)
def test_a_run_is_compared_with_the_row_of_its_method(
    recipe: str, words: list[str], over: float | None
) -> None:
    run = load_recipe(recipe, words)
    found = expected_loss(run.compression, run.lora is not None, 10_000, 4, None)

    assert (found.over if found else None) == over


def test_what_lies_beyond_the_rows_is_named() -> None:
    method = load_recipe("smoke").compression
    near, far = (
        expected_loss(method, False, 10_000, 3, 2000),
        expected_loss(method, False, 10**9, 16, 48),
    )
    assert near is not None
    assert far is not None

    assert (near.peers, near.beyond) == (4, ())
    assert far.peers == 8
    assert far.beyond == (
        "more than 8 peers",
        "more than 132,864 trained parameters",
        "fewer than 1,600 steps",
    )
