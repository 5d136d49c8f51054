"""`cocktail export` with its options, `generate` from what it writes, and what goes to the hub, whose client
is a stand-in."""

import io
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flipped_bytes import altered
from huggingface_hub.errors import LocalTokenNotFoundError
from in_this_process import Run
from pushing_hub import Hub, status
from safetensors.torch import load_file
from test_snapshot_thread import RECIPE, Story, minding, told

from cocktail_cli.host import hashes_of
from cocktail_cli.machine import RunRecord, save_run
from cocktail_cli.ui import Checkpoint
from recipes.algorithm import GlobalModel, compressor_of
from recipes.config import Recipe, load_recipe
from recipes.downloads import Repository
from recipes.errors import HubUnreachable, ModelError
from recipes.models import (
    TextGenerator,
    base_manifest,
    load_model,
    manifest_digest,
    open_tokenizer,
    open_trained,
    prepare_base,
)
from recipes.training import FlatParameters
from transport import Ledger
from transport.ledger import EvaluationRow

LORA = load_recipe(
    "smoke", ["lora_r=2", "lora_target_modules=[query_key_value]", "max_steps=40", "save_steps=4"]
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_base(RECIPE, tmp_path_factory.mktemp("made") / "base").folder


def story_of(recipe: Recipe, base: Path, folder: Path) -> Story:
    """A run that has trained for some rounds, as `export` finds it."""
    shutil.copytree(base, folder / "base")
    files = base_manifest(folder / "base")
    origin = {"recipe": recipe.recipe_hash, "base": manifest_digest(files), **hashes_of(folder, (), files)}
    open_tokenizer(base).save_pretrained(folder / "tokenizer")
    (folder / "recipe.json").write_text(recipe.to_json())
    start = open_trained(recipe, folder / "base")
    vector = torch.from_numpy(start.read(0, start.layout.size))
    start.close()
    ledger = Ledger(folder / "ledger", run="amber-otter-42", samples=10_000, origin=origin)
    story = Story(
        folder, ledger, GlobalModel(vector, compressor_of(recipe.compression), recipe.training.seed)
    )
    story.commit(6)
    record = RunRecord(
        "amber-otter-42", "url", {}, 1, 1, "", str(folder), str(folder / "base"), "r", "h", "t"
    )
    save_run(record.ended("finished", 6, None))
    return story


@pytest.fixture
def whole(base: Path, tmp_path: Path) -> Iterator[Story]:
    story = story_of(RECIPE, base, tmp_path / "run")
    yield story
    story.ledger.close()


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> Iterator[Story]:
    story = story_of(LORA, base, tmp_path / "run")
    yield story
    story.ledger.close()


def test_an_export_of_adapters_names_its_base_model(cocktail: Run, adapters: Story, tmp_path: Path) -> None:
    done = cocktail("export", "amber-otter-42", "-o", str(tmp_path / "out"))

    assert done.exit == 0, done.err
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= names
    assert "config.json" not in names
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert Path(told["base_model_name_or_path"]) == adapters.folder / "base"
    held = torch.cat(
        [t.reshape(-1) for t in load_file(tmp_path / "out" / "adapter_model.safetensors").values()]
    )
    assert torch.equal(held.sort().values, adapters.common.vector.sort().values)


def test_a_merged_export_in_bfloat16_is_a_complete_model(
    cocktail: Run, adapters: Story, tmp_path: Path
) -> None:
    done = cocktail(
        "export", "amber-otter-42", "-o", str(tmp_path / "out"), "--merge-lora", "--dtype", "bfloat16"
    )

    assert done.exit == 0, done.err
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    base = load_file(adapters.folder / "base" / "model.safetensors")
    changed = [name for name in weights if not torch.equal(weights[name], base[name].to(torch.bfloat16))]
    assert sorted(changed) == [f"gpt_neox.layers.{i}.attention.query_key_value.weight" for i in range(2)]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    load_model(tmp_path / "out")


def test_a_run_without_adapters_is_exported_in_float16_and_has_nothing_to_merge(
    cocktail: Run, whole: Story, tmp_path: Path
) -> None:
    done = cocktail("export", "amber-otter-42", "-o", str(tmp_path / "out"), "--dtype", "float16")
    other = cocktail("export", "amber-otter-42", "-o", str(tmp_path / "other"), "--merge-lora")

    assert done.exit == 0, done.err
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert other.exit == 2
    assert "no adapters" in other.err
    assert not (tmp_path / "other").exists()


def test_an_export_of_a_round_is_the_global_model_of_that_round(
    cocktail: Run, whole: Story, tmp_path: Path
) -> None:
    def vector(checkpoint: str) -> torch.Tensor:
        done = cocktail(
            "export", "amber-otter-42", "-o", str(tmp_path / checkpoint), "--checkpoint", checkpoint
        )
        assert done.exit == 0, done.err
        return FlatParameters(load_model(tmp_path / checkpoint)).vector

    unmeasured = cocktail("export", "amber-otter-42", "-o", "best", "--checkpoint", "best")
    assert (unmeasured.exit, "not measured" in unmeasured.err) == (2, True)
    beyond = cocktail("export", "amber-otter-42", "-o", "best", "--checkpoint", "7")
    assert (beyond.exit, "hint: 0 (the base) to 6, or best" in beyond.err) == (2, True)
    for round, loss in ((0, 4.0), (2, 3.0), (6, 3.5)):
        whole.ledger.evaluated(EvaluationRow(round, round, loss, 8, round == 6))

    assert torch.equal(vector("4"), whole.before[4])
    assert torch.equal(vector("best"), whole.before[2])


def test_an_export_from_altered_rows_is_refused_and_a_damaged_snapshot_is_passed_over(
    cocktail: Run, whole: Story, tmp_path: Path
) -> None:
    """A row that was altered chose the best model."""
    whole.ledger.evaluated(EvaluationRow(2, 2, 3.0, 8, False))
    with minding(whole) as (snapshots, _):
        snapshots.committed(5, 6)
        made = told(snapshots)
    assert isinstance(made, Checkpoint)
    whole.ledger.close()
    weights = Path(made.model) / "model.safetensors"
    with altered(weights, -3):
        done = cocktail("export", "amber-otter-42", "-o", "model", "--checkpoint", "6")
    assert done.exit == 0, done.err
    assert f"{weights} (or its hashes, model.safetensors.sha256) is damaged" in done.err
    x = FlatParameters(load_model(tmp_path / "model")).vector
    assert torch.equal(x, whole.common.vector)

    with sqlite3.connect(whole.folder / "ledger" / "ledger.db") as db:
        db.execute("INSERT INTO evaluations VALUES (4, 4, 0.5, 8, 0, '[]')")
    db.close()
    refused = cocktail("export", "amber-otter-42", "-o", "best", "--checkpoint", "best")
    assert (refused.exit, "it has other rows than journal.log (evaluations, 4)" in refused.err) == (4, True)


def test_generate_continues_a_prompt_with_the_base_and_with_the_trained_model(
    cocktail: Run, whole: Story
) -> None:
    whole.model.write_model(whole.folder)

    done = cocktail("generate", "amber-otter-42", "The", "--base", "--max-new-tokens", "3", "--json")

    assert done.exit == 0, done.err
    told = json.loads(done.out)
    assert (told["model"], told["base"]) == (str(whole.folder), str(whole.folder / "base"))
    assert told["text"] == TextGenerator(whole.folder).generate("The", 3)
    assert told["base_text"] == TextGenerator(whole.folder / "base").generate("The", 3)
    assert cocktail("generate", "amber-otter-42", "--base", "-i").exit == 2


@pytest.mark.parametrize(
    ("template", "second"),
    [
        ("{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}", "u:one|a:1|u:two|"),
        ("", "two"),
    ],
)
def test_a_conversation_reaches_the_model_through_the_chat_template(
    cocktail: Run, whole: Story, monkeypatch: pytest.MonkeyPatch, template: str, second: str
) -> None:
    whole.model.write_model(whole.folder)
    if template:
        (whole.folder / "chat_template.jinja").write_text(template)
    heard: list[str] = []

    def write(self: TextGenerator, prompt: str, *settings: object, **more: object) -> str:
        heard.append(prompt)
        return str(len(heard))

    monkeypatch.setattr(TextGenerator, "generate", write)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))

    done = cocktail("generate", "amber-otter-42", "-i")

    assert (done.exit, done.out) == (0, "1\n2\n"), done.err
    assert heard[1] == second


def test_a_push_uploads_the_model_and_nothing_else(
    cocktail: Run, whole: Story, tmp_path: Path, hub: Hub
) -> None:
    done = cocktail(
        "export", "amber-otter-42", "-o", str(tmp_path / "out"), "--push", "me/m", "--private", "--json"
    )

    assert done.exit == 0, done.err
    assert json.loads(done.out)["pushed"] == "https://hub/me/m/commit/1"
    assert hub.made == [{"repo_id": "me/m", "private": True, "exist_ok": True}]
    [pushed] = hub.pushed
    wanted = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert [name for name in pushed["sent"] if not name.startswith("tokenizer")] == wanted


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (LocalTokenNotFoundError("x"), ModelError, "no token"),
        (status(403), ModelError, "may not write"),
        (status(500), HubUnreachable, "could not be written"),
        (ConnectionError("no"), HubUnreachable, "did not answer"),
    ],
)
def test_the_error_of_a_failed_push_says_why(
    hub: Hub, tmp_path: Path, error: Exception, kind: type, said: str
) -> None:
    hub.error = error

    with pytest.raises(kind, match=said):
        Repository("me/m").open()
    with pytest.raises(kind, match=said):
        Repository("me/m").push(tmp_path, "a model")


def test_a_push_without_a_token_exports_nothing(
    cocktail: Run, whole: Story, tmp_path: Path, hub: Hub
) -> None:
    hub.error = LocalTokenNotFoundError("x")

    done = cocktail("export", "amber-otter-42", "-o", str(tmp_path / "out"), "--push", "me/m")

    assert done.exit == 3
    assert "hf auth login" in done.err
    assert not (tmp_path / "out").exists()
