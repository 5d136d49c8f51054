"""scripts/bench_quality --model: peers of a language model, and cells that are cut short and go on."""

import shutil
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.config import load_recipe
from recipes.models import load_trained
from recipes.training import FlatParameters, learning_rate
from scripts.report.rival_tables import language_models
from scripts.study.begun import Begun
from scripts.study.cells import Cell, read, write
from scripts.study.language import LanguageModel, documents, questions, some
from scripts.study.language.gguf_folder import model_folder
from scripts.study.language_plan import EVERY, LANGUAGE_CELLS, WAYS, best, compared, language, way_named
from scripts.study.plan import ADAPTERS, EXACT, SUM
from scripts.study.run import Place, main, run
from scripts.study.train import Outcome, Setting, Size, Swarm, backward, prepared, steps, train
from scripts.swarms.random_models import save_random

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = ("peer", "packet", "round", "hub", "gradient", "line", "joins", "sends", "holds", "the", "a", "its")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, and sixty documents."""
    folder = tmp_path_factory.mktemp("language")
    save_random(folder / "model", "LlamaConfig", vocab_size=320, **SIZES)
    draws = torch.Generator().manual_seed(1)
    (folder / "text").mkdir()
    for number in range(60):
        chosen = torch.randint(len(WORDS), (200,), generator=draws).tolist()
        (folder / "text" / f"{number}.txt").write_text(" ".join(WORDS[at] for at in chosen))
    return folder


@pytest.fixture
def size(place: Path) -> Size:
    return Size(length=24, rows=4, steps=8, model=str(place / "model"), text=str(place / "text"), held=8)


@pytest.mark.slow
def test_adapters_of_all_peers_in_one_pass_have_the_gradients_that_peft_has(place: Path) -> None:
    model = LanguageModel(place / "model", 4, "cpu")
    draws = torch.Generator().manual_seed(2)
    vectors = [model.start + torch.randn(len(model.start), generator=draws) * 0.1 for _ in range(3)]
    rows = torch.randint(320, (3, 2, 24), generator=draws)

    grads = model.gradients(vectors, rows)

    words = ["lora.lora_r=4", "lora.lora_alpha=8", "lora.lora_dropout=0"]
    recipe = load_recipe("finetune", words, model=str(place / "model"))
    peft = FlatParameters(load_trained(recipe, place / "model"))
    for vector, own, grad in zip(vectors, rows, grads, strict=True):
        peft.take(vector)
        loss = backward(peft, own, limit=0.0)
        assert model.loss(vector, own) == pytest.approx(loss, rel=1e-5)
        assert float(torch.dist(grad, peft.grad)) < 1e-5 * float(peft.grad.norm())


@pytest.mark.slow
def test_four_peers_of_adapters_learn_what_all_reduce_learns(size: Size, tmp_path: Path) -> None:
    dense = train(size, replace(EXACT, peers=0, lora=4), 2e-2, 1, tmp_path)
    peers = train(size, replace(ADAPTERS, peers=4, lora=4), 2e-2, 1, tmp_path)
    untouched = train(size, replace(EXACT, peers=0, lora=4), 0.0, 1, tmp_path)

    assert dense.loss < untouched.loss - 0.05
    assert peers.loss - dense.loss < 0.5 * (untouched.loss - dense.loss)
    assert len(peers.curve) == 8
    assert 0 <= peers.choice <= 1
    assert peers.other > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [replace(ADAPTERS, peers=4, lora=4), replace(SUM, peers=2, local_steps=2)]
)
def test_a_cell_that_is_cut_short_is_a_row_that_says_so_and_goes_on_to_the_same_end(
    setting: Setting, size: Size, tmp_path: Path
) -> None:
    cell, results = Cell(setting, 2e-2, 1), tmp_path / "results.jsonl"
    place = Place(tmp_path, results, 1, float("inf"))
    whole = train(size, setting, cell.rate, cell.seed, tmp_path)
    file = tmp_path / "begun" / "cell.safetensors"

    short = train(size, setting, cell.rate, cell.seed, tmp_path, Begun(until=0.0, file=file))
    write(results, size, cell, short)
    assert read(results, size) == {}
    assert read(results, size, cut=True)[cell].done == setting.local_steps / 8
    assert "of the steps" in language({}, {Cell(WAYS[16]["first"][2].setting, 2e-3, 1): short})
    rest = train(size, setting, cell.rate, cell.seed, tmp_path, Begun(file=file))
    run(size, [cell], place)

    assert read(results, size, cut=True) == {}
    assert rest.loss == pytest.approx(whole.loss, rel=1e-5)
    assert rest.curve == pytest.approx(whole.curve, rel=1e-5)
    assert rest.up == pytest.approx(whole.up)


def test_the_list_of_cells_begins_with_the_first_six_and_each_way_is_found_by_name() -> None:
    first = LANGUAGE_CELLS[1:7]

    assert [cell.setting.lora for cell in first] == [16, 16, 16, 0, 0, 0]
    assert {cell.setting.peers for cell in first} == {0, 8}
    assert len({*LANGUAGE_CELLS}) == len(LANGUAGE_CELLS)
    assert all(way_named(way.name) == way for way in EVERY)
    assert [way_named(name) for name in ("lora-cocktail", "cocktail")] == [
        WAYS[r]["first"][2] for r in (16, 0)
    ]
    with pytest.raises(ArgumentTypeError, match="which row is 'peers'"):
        way_named("peers")


def test_a_way_is_tuned_where_a_lower_and_a_higher_rate_are_worse() -> None:
    product, dense = WAYS[16]["first"][2], WAYS[16]["first"][0]

    def ended(chosen: float) -> Outcome:
        return Outcome(1.0, 1.0, (), 1.0, 1.0, 9.0, 0.0, 0.0, (chosen, 2 * chosen))

    found = {Cell(product.setting, 1e-3 * rate, 1): ended(loss) for rate, loss in ((1, 1.2), (2, 1.1))}
    found |= {
        Cell(dense.setting, 1e-3 * rate, 1): ended(loss) for rate, loss in ((1, 1.1), (2, 1.0), (4, 1.3))
    }

    assert best(found, dense.setting) == (2e-3, True)
    assert best(found, product.setting) == (2e-3, False)
    assert compared(found, product, 2e-3) == ("+10.00%", "+10.00%, not tuned")
    assert compared(found, product, 1e-3) == ("+9.09%", "")
    assert language(found, {}).count("\n| ") == 5
    own = Cell(Setting(peers=2, lora=3), 1e-3, 1)
    assert "| peers=2,lora=3 |" in language({own: ended(1.0)}, {})


def test_a_cell_whose_time_is_over_before_it_begins_is_no_row(size: Size, tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "results.jsonl", 1, 0.0)
    run(size, [Cell(SUM, 1e-3, 1), Cell(EXACT, 1e-3, 1)], place)

    assert not place.results.exists()


def test_results_have_a_table_of_each_language_model_at_the_sizes_of_the_readme(tmp_path: Path) -> None:
    outcome = Outcome(1.0, 1.0, (), 1.0, 1.0, 9.0, 0.0, 0.0, (1.0, 1.0))
    size = Size(model="smollm2", text="pages-a", length=512, rows=32, steps=300)
    for one in (size, replace(size, text="pages-b", held=8)):
        write(tmp_path / "quality.jsonl", one, LANGUAGE_CELLS[1], outcome)
    made = language_models(tmp_path)

    assert made.startswith("**pages-a-512x32x300**\n")
    assert "all-reduce, LoRA r 16 |" in made
    assert "pages-b" not in made


def test_a_model_that_is_no_folder_is_told() -> None:
    with pytest.raises(SystemExit, match="--model nowhere: expected a folder"):
        model_folder("nowhere", Path())


def test_tables_at_the_rates_of_all_reduce_are_not_made_of_a_language_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_quality", "--same-rate", "--model", "smollm2"])
    with pytest.raises(SystemExit, match="--same-rate: its tables are of the study's own model"):
        main()


@pytest.mark.slow
def test_peers_that_exchange_vectors_on_their_device_end_where_packets_lead(
    size: Size, tmp_path: Path
) -> None:
    setting = replace(SUM, peers=4, lora=4, sample=0.5)
    model, texts = prepared(size, setting, tmp_path)
    training = setting.training(2e-2, 1, size.steps)
    ends, sent = [], []
    for on_device in (False, True):
        swarm = Swarm(model, setting, training, on_device)
        for _ in steps(size, swarm, texts.text, learning_rate(training, size.steps)):
            pass
        swarm.count_bytes()
        ends.append(swarm.shared)
        sent.append(swarm.up + swarm.down)

    moved = float(torch.dist(ends[0], model.start))
    assert float(torch.dist(*ends)) < 0.01 * moved
    assert sent[1] == pytest.approx(sent[0], rel=0.1)


@pytest.mark.slow
def test_a_whole_model_is_trained_too(size: Size, tmp_path: Path) -> None:
    whole = train(replace(size, steps=4), replace(EXACT, peers=2), 2e-2, 1, tmp_path)
    untouched = train(size, replace(EXACT, peers=0), 0.0, 1, tmp_path)

    assert whole.loss < untouched.loss


def test_a_document_is_of_one_part_and_questions_end_in_four_ways(place: Path) -> None:
    shutil.copy(place / "text" / "1.txt", place / "text" / "picture.png")
    (place / "text" / "picture.png").write_bytes(b"\x89PNG\xff")

    assert len([*documents(place / "text")]) == 60
    rows = torch.arange(8 * 24).view(8, 24)
    asked = questions(rows, 3)
    assert asked.shape == (3, 4, 24)
    assert (asked[:, :, :8] == asked[:, :1, :8]).all()
    assert len({tuple(row[-16:].tolist()) for row in asked[0]}) == 4
    assert len(some(rows, 3)) == 3
