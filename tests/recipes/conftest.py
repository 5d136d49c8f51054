"""Fixtures of the room: rows as a corpus, a recipe's text as a file, tiny models as folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from a_web import Web
from tiny_models import BUILTIN, CONFIGS

from recipes.config import load_recipe
from recipes.data import Corpus, build_corpus
from recipes.downloads import fetch_text, https_file
from recipes.models import open_tokenizer

BARE = """\
version: 1
name: bare
model: {model_name_or_path: "builtin:tiny-gpt-neox"}
datasets: [{path: DATA}]
data: {max_length: 64, shuffle_dataset: false}
"""


@pytest.fixture
def tokenizer() -> Any:
    return open_tokenizer(BUILTIN)


@pytest.fixture
def corpus_of(tmp_path: Path, tokenizer: Any):
    """Rows (or the text of a .jsonl) and overrides -> the corpus."""

    def built(rows: list[dict] | str | bytes, *overrides: str, file: str = "my.jsonl") -> Corpus:
        text = rows
        if isinstance(rows, list):
            text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / file).write_bytes(text if isinstance(text, bytes) else str(text).encode())
        recipe = tmp_path / "bare.yaml"
        recipe.write_text(BARE)
        return build_corpus(load_recipe(recipe, list(overrides), data=str(tmp_path / file)), tokenizer)

    return built


@pytest.fixture
def write(tmp_path: Path):
    """Text -> the path of a recipe with that text."""

    def written(text: str | bytes) -> Path:
        path = tmp_path / "my.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return written


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder saved by `save_pretrained` for each architecture that is asked for, with the builtin
    tokenizer."""

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            torch.manual_seed(1)
            folder = self[name] = tmp_path_factory.mktemp(name)
            transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).save_pretrained(folder)
            for file in BUILTIN.glob("tokenizer*.json"):
                shutil.copyfile(file, folder / file.name)
            return folder

    return Made()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Set what the web answers from now on: a body, and a status."""

    def serving(*args: Any, **more: Any) -> Web:
        web = Web(*args, **more)
        monkeypatch.setattr("urllib.request.urlopen", web)
        fetch_text.cache_clear()
        https_file.cache_clear()
        return web

    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return serving
