"""Requirements are checked before anything is fetched; an unknown value is held against nobody."""

import json
from pathlib import Path

import pytest
from in_this_process import Run
from stalling_hub import Material, stalling_hub

from cocktail_cli.volunteer import Resources, lacking, requirements_column
from recipes.config import load_recipe

GB = 10**9
WANTS = ["swarm.requires.vram=24GB", "swarm.requires.disk=30GB", "swarm.requires.bandwidth_mbps=20"]


def has(memory: float = 24, disk: float = 30, mbit: float = 20) -> Resources:
    return Resources(int(memory * GB), int(disk * GB), mbit * 1e6 / 8)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (has(), []),
        (has(memory=22.1), []),  # what a card sold as 24 GB leaves to programs
        (has(memory=16), ["24.0 GB of memory needed, 16.0 GB here"]),
        (has(disk=12), ["30.0 GB of disk needed, 12.0 GB free"]),
        (has(mbit=5), ["20 Mbit/s needed, 5 allowed here"]),
        (has(memory=0, mbit=0), []),  # not known
    ],
)
def test_a_machine_lacks_what_is_below_what_is_required(machine: Resources, words: list[str]) -> None:
    assert lacking(load_recipe("smoke", WANTS), machine) == words


def test_a_recipe_that_requires_nothing_fits_everywhere() -> None:
    recipe = load_recipe("smoke")

    assert (lacking(recipe, has(0, 0, 0)), requirements_column(recipe)) == ([], "-")
    assert requirements_column(load_recipe("smoke", WANTS)) == "24 GB 20 Mbit"
    has(0, 0, 0).check(recipe)


def test_the_list_says_what_this_machine_can_do(cocktail: Run) -> None:
    rows = json.loads(cocktail("recipes", "list", "--fits", "--device", "cpu", "--json").out)["recipes"]

    assert {row["name"]: row["here"] for row in rows}["smoke"] == "fits"


@pytest.mark.slow
def test_a_join_below_what_is_required_is_exit_6_before_anything_is_fetched(
    cocktail: Run, tmp_path: Path
) -> None:
    material = Material.prepare(tmp_path / "base", "swarm.requires.disk=900TB")
    with stalling_hub(material, tmp_path / "ledger") as running:
        said = cocktail("join", str(running.url), "-y", "--device", "cpu")

    assert said.exit == 6
    assert "the run requires more than this machine has: 900000.0 GB of disk needed" in said.err
