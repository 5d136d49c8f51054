"""scripts/bench_quality: its cells are what they say, and its search ends at the best rate of the grid."""

from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.config import Compression, Training, load_recipe
from recipes.training import learning_rate
from scripts import ROOT
from scripts.study.cells import Cell, read, setting_of, setting_text, shipped
from scripts.study.model import Models
from scripts.study.plan import (
    DGC,
    OWN_WIDE,
    RATES,
    REFERENCE,
    SEEDS,
    SPARSEST,
    SUM,
    TABLES,
    WIDE,
    best_rate,
    losses,
    missing,
    row_named,
)
from scripts.study.run import QUICK, Place, run
from scripts.study.tables import markdown, optimizers
from scripts.study.train import (
    COMPRESSION,
    ByteModel,
    Outcome,
    Setting,
    Size,
    Swarm,
    backward,
    base,
    documentation,
    loss_at,
    new_model,
    train,
)

EXACT = Setting(peers=1, sample=1.0, keep=1.0, bits=32, staleness=0)  # packets that lose nothing
TWO = replace(EXACT, peers=2)


def test_the_study_begins_at_the_papers_preset_and_what_it_recommends_is_the_default() -> None:
    def of(preset: str) -> Compression:
        """A preset's values, all written, so that nothing is left to `auto`."""
        return Compression(preset=preset).model_copy(update={"preset": "cocktail", "auto": ()})

    for setting, preset in (
        (Setting(), "cocktail-paper"),
        (SUM, "cocktail"),
        (WIDE, "cocktail-wide"),
        (SPARSEST, "cocktail-thin"),
        (DGC, "dgc"),
    ):
        assert setting.compression == of(preset)
    for setting in (Setting(), SUM):
        assert setting.training(1e-3, 7, 9) == Training(learning_rate=1e-3, seed=7, max_steps=9)


def test_without_loss_one_peer_is_all_reduce(plain: Outcome, tmp_path: Path) -> None:
    other = train(QUICK, REFERENCE.setting, 2e-3, 1, tmp_path)

    assert plain.loss == pytest.approx(other.loss, rel=1e-4)
    assert plain.curve == pytest.approx(other.curve, rel=1e-4)


def test_without_loss_two_peers_are_their_average(tmp_path: Path) -> None:
    """Beside a loop that takes the mean of both models after each step, without packets."""
    exact = train(QUICK, TWO, 2e-3, 1, tmp_path)

    text, held = documentation(QUICK.length)
    training = TWO.training(2e-3, 1, QUICK.steps)
    rate = learning_rate(training, QUICK.steps)
    swarm = Swarm(ByteModel(QUICK, base(QUICK, tmp_path)), TWO, training)
    both = [peer.flat.vector for peer in swarm.peers]
    for step in range(QUICK.steps):
        swarm.step(text.rows(QUICK.rows, 1, step), rate(step))
        mean = torch.stack(both).mean(0)
        for vector in both:
            vector.copy_(mean)
    assert exact.loss == pytest.approx(loss_at(swarm.peers[0].flat, mean, held.all()), rel=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One peer whose packets lose nothing, and of whose rounds none is in flight."""
    return train(QUICK, EXACT, 2e-3, 1, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_one_peer_is_plain_training_at_any_staleness_and_after_the_last_round_all_of_it_is_in_x_prime(
    plain: Outcome, staleness: int, tmp_path: Path
) -> None:
    """Its own steps are in x_i at once; only x' is behind, and by nothing at the end."""
    stale = train(QUICK, replace(EXACT, staleness=staleness), 2e-3, 1, tmp_path)

    assert stale.loss == pytest.approx(plain.loss, rel=1e-4)
    assert stale.residual < 1e-4


@pytest.mark.slow
def test_48_steps_of_adapters_by_the_defaults_end_where_all_reduce_does(tmp_path: Path) -> None:
    """A value of a sampled and sparse vector waits for more steps than that, and ends .6 % above."""
    chosen = load_recipe("smoke", ["lora.lora_r=4"]).compression
    keys = {name: getattr(chosen, key) for key, name in COMPRESSION.items()}
    size = Size(hidden=32, layers=1, length=32, steps=48, base_steps=200)
    ways = replace(REFERENCE.setting, lora=4), Setting(peers=4, lora=4, own_noise=0, **keys)

    dense, product = (train(size, way, 2e-2, 1, tmp_path).loss for way in ways)

    assert product <= 1.002 * dense


def test_models_computed_together_have_the_gradients_that_each_has_in_transformers() -> None:
    models = [new_model(QUICK) for _ in range(3)]
    for seed, flat in enumerate(models):
        noise = torch.randn(flat.vector.shape, generator=torch.Generator().manual_seed(seed))
        flat.vector.add_(noise, alpha=0.1)
    rows = torch.randint(256, (3, 2, QUICK.length), generator=torch.Generator().manual_seed(9))

    together = Models(models[0].model.config, models[0].layout, QUICK.length)
    grads, losses = together.gradients([flat.vector for flat in models], rows.unbind())

    for flat, its_rows, grad, loss in zip(models, rows, grads, losses, strict=True):
        assert float(loss) == pytest.approx(backward(flat, its_rows, limit=0.0), rel=1e-5)
        assert float(torch.dist(grad, flat.grad)) < 1e-5 * float(flat.grad.norm())


def test_a_cell_is_made_once_and_found_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    cell = Cell(Setting(bits=2, local_steps=2, dropped=0.3), 2e-3, 1)

    for _ in range(2):
        run(QUICK, [cell], Place(tmp_path, results, 1, float("inf")))

    assert len(results.read_text().splitlines()) == 1
    (there, outcome), *_ = read(results, QUICK).items()
    assert there == cell
    assert outcome.ratio > 10
    assert outcome.mean != outcome.loss  # something is unsent


def test_a_setting_is_written_as_it_is_changed() -> None:
    text = "peers=8,keep=0.05,bits=2"

    assert setting_text(setting_of(text)) == text
    with pytest.raises(ArgumentTypeError, match="'kep=1': expected one of peers, sample, keep"):
        setting_of("kep=1")


def test_a_setting_may_have_the_names_of_a_recipe() -> None:
    of_recipe = "random_ratio=0.113,quant_bits=2,outer_learning_rate=packets,own_noise=0"

    assert setting_of(of_recipe) == row_named("cocktail").setting


def test_each_row_of_the_readme_is_found_by_its_name_and_has_a_measured_rate() -> None:
    table = (ROOT / "README.md").read_text().partition("What does the model lose?")[2].partition("<!--")[0]
    names = [
        line[2:].split(" | ")[0] for line in table.splitlines() if line.startswith("| p") or "LoCo" in line
    ]
    rows = [row_named(name) for name in names]

    assert len(names) > 5
    assert [row.name for row in rows] == names
    assert all(losses(shipped(Size()), row.setting) for row in rows)
    assert row_named("cocktail-thin").name in names
    with pytest.raises(ArgumentTypeError, match="which row is"):
        row_named("p=.04")


def test_the_plan_finds_each_rows_best_rate_and_ends() -> None:
    """A valley that lies elsewhere for each row."""
    found: dict[Cell, Outcome] = {}
    while wanted := missing(found):
        for cell in wanted:
            assert cell not in found, "asked for twice"
            valley = RATES[cell.setting.bits % len(RATES)]
            found[cell] = Outcome(1 + abs(cell.rate - valley), 1.0, (), 1.0, 1.0, 120.0, 0.0, 0.0)

    for table in TABLES:
        for row in table.all:
            like = row.like or row.setting
            assert best_rate(found, row) == RATES[like.bits % len(RATES)]
            assert all(Cell(row.setting, best_rate(found, row), seed) in found for seed in table.seeds)
    assert len([c for c in found if c.setting == REFERENCE.setting and c.seed == SEEDS[1]]) == 1
    assert markdown(found, TABLES[0]).count("\n| ") >= len(TABLES[0].all)


def test_optimizers_are_compared_at_rates_that_the_other_half_chose() -> None:
    def ended(chosen: float, reported: float) -> Outcome:
        return Outcome(1.0, 1.0, (), 1.0, 1.0, 120.0, 0.0, 0.0, (chosen, reported))

    sparse = replace(OWN_WIDE, peers=8)
    found = {
        Cell(Setting(peers=0), 4e-3, 1): ended(1.0, 2.0),
        Cell(Setting(peers=0), 8e-3, 1): ended(1.1, 1.5),  # better on the half that is reported
        Cell(sparse, 8e-3, 1): ended(1.0, 2.1),
        Cell(sparse, 8e-3, 2): ended(0.5, 3.0),  # with a seed that all-reduce has not
    }

    _, _, dense, peers = optimizers(found).strip().splitlines()

    assert dense == "| all-reduce, 8 samples | AdamW |  | 0.004 | 2.0000 (1) |  | +0.00% |"
    assert peers == "| 8 peers | AdamW | 120x | 0.008 | 2.5500 (2) | +5.00% | +5.00% |"
