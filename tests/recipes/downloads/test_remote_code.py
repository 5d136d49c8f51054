"""Models that come with Python code: it runs where the recipe says so, and is then part of the base."""

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import BUILTIN, SIZES

from recipes.config import load_recipe
from recipes.errors import ModelError
from recipes.models import (
    TextGenerator,
    base_manifest,
    check_trainable,
    count_trainable,
    load_model,
    open_tokenizer,
    open_vector,
    prepare_base,
)

MODELING = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({ran!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a class that transformers does not have. Its code, run, makes the file `ran`."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    made = tmp_path / "own"
    torch.manual_seed(1)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=320, **SIZES["llama"], **ends)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made)
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    configured(made, model_type="own-llama", auto_map=own)
    (made / "modeling_own.py").write_text(MODELING.format(ran=str(tmp_path / "ran")))
    for file in BUILTIN.glob("tokenizer*.json"):
        shutil.copyfile(file, made / file.name)
    return made


def configured(folder: Path, **keys: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def names(files: Sequence[object]) -> list[str]:
    return [getattr(file, "name", "") for file in files]


def test_code_of_a_model_is_not_run_and_the_error_says_what_would_run_it(
    folder: Path, tmp_path: Path
) -> None:
    wanted = r"comes with code of its own, modeling_own.*trust_remote_code=true, and --trust-remote-code"
    recipe = load_recipe("smoke", model=str(folder))

    for use in (load_model, open_vector, generate_from, lambda _: check_trainable(recipe, folder)):
        with pytest.raises(ModelError, match=wanted):
            use(folder)

    assert not (tmp_path / "ran").exists()
    assert "modeling_own.py" not in names(prepare_base(recipe, tmp_path / "unused").files)


def generate_from(folder: Path) -> str:
    return TextGenerator(folder).generate("Hello", max_new_tokens=2)


def test_a_recipe_that_wants_it_runs_it_and_its_files_are_known_by_hash(folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe("smoke", ["trust_remote_code=true"], model=str(folder))

    base = prepare_base(recipe, tmp_path / "unused")
    check_trainable(recipe, base.folder)
    model = load_model(folder, code=True)

    assert (tmp_path / "ran").exists()
    assert type(model).__name__ == "OwnForCausalLM"
    assert "modeling_own.py" in names(base.files)
    assert base.digest != type(base)(folder, base_manifest(folder)).digest
    assert count_trainable(recipe, folder) == sum(p.numel() for p in model.parameters())
    assert isinstance(TextGenerator(folder, code=True).generate("Hello", max_new_tokens=2), str)


def test_a_snapshot_of_such_a_model_has_its_code_beside_the_weights(folder: Path) -> None:
    with closing(open_vector(folder, code=True)) as vector:
        assert vector.on_disk
        assert vector.config_files["modeling_own.py"] == (folder / "modeling_own.py").read_text()


def test_code_that_lies_in_another_repository_is_refused(folder: Path, tmp_path: Path) -> None:
    configured(folder, auto_map={"AutoConfig": "some/where--modeling_own.OwnConfig"})

    with pytest.raises(ModelError, match="its code lies in another repository, some/where"):
        load_model(folder, code=True)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_with_code_is_not_opened_without_a_word_of_the_recipe(
    folder: Path, tmp_path: Path
) -> None:
    file = folder / "tokenizer_config.json"
    own = {"AutoTokenizer": ["modeling_own.Own", None]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": own, "tokenizer_class": "Own"}))

    with pytest.raises(ModelError):
        open_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_transformers_knows_is_loaded_as_its_own_class_whatever_comes_with_it(
    folder: Path, tmp_path: Path
) -> None:
    configured(folder, model_type="llama")

    assert type(load_model(folder)).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()
