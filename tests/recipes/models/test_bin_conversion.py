"""Weights in `.bin` files: read as tensors and nothing else, and written anew, to the bit."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recipes.config import load_recipe
from recipes.errors import ModelError
from recipes.models import load_model, open_vector, prepare_base
from recipes.training import FlatParameters


@pytest.fixture
def saved(folders: dict[str, Path], tmp_path: Path):
    """(architecture, weights) -> a folder of that model with these, or its own, in `.bin` files."""

    def made(kind: str, weights: Any = None, files: int = 1, **options: Any) -> Path:
        folder = tmp_path / "old"
        shutil.copytree(folders[kind], folder)
        weights = load_file(folder / "model.safetensors") if weights is None else weights
        (folder / "model.safetensors").unlink()
        if files == 1:
            torch.save(weights, folder / "pytorch_model.bin", **options)
            return folder
        places = {key: f"pytorch_model-{n % files}.bin" for n, key in enumerate(weights)}
        for name in set(places.values()):
            torch.save({key: weights[key] for key, at in places.items() if at == name}, folder / name)
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": places})
        )
        return folder

    return made


def prepared(folder: Path, tmp_path: Path) -> Any:
    return prepare_base(load_recipe("smoke", model=str(folder)), tmp_path / "run" / "base")


@pytest.mark.parametrize("how", ["one file", "three files", "no archive"])
def test_what_peers_get_is_one_safetensors_file_with_the_same_bits(saved, tmp_path, how: str) -> None:
    options = {"_use_new_zipfile_serialization": False} if how == "no archive" else {}
    folder = saved("llama", files=3 if how == "three files" else 1, **options)
    before = sorted(folder.iterdir())

    base, again = prepared(folder, tmp_path), prepared(folder, tmp_path)

    others = {path.name for path in before if "pytorch_model" not in path.name}
    assert {file.name for file in base.files} == others | {"model.safetensors"}
    assert base == again
    assert sorted(folder.iterdir()) == before
    assert torch.equal(
        FlatParameters(load_model(base.folder)).vector, FlatParameters(load_model(folder)).vector
    )
    with closing(open_vector(base.folder)) as vector:
        assert vector.on_disk


def test_weights_that_were_saved_again_are_not_taken_for_those_before(folders, saved, tmp_path) -> None:
    weights = load_file(folders["llama"] / "model.safetensors")
    folder = saved("llama", weights)
    before = prepared(folder, tmp_path)
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, folder / "pytorch_model.bin")

    assert prepared(folder, tmp_path).digest != before.digest


def test_other_kinds_of_numbers_stay_what_they_are_wherever_they_lie(folders, saved, tmp_path) -> None:
    weights = load_file(folders["gpt_neox"] / "model.safetensors")
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    weights["a"] = torch.arange(6.0).view(2, 3).t()  # another order in memory than by its places

    base = prepared(saved("gpt_neox", weights), tmp_path)

    assert_same(load_file(base.folder / "model.safetensors"), weights)


def test_a_tied_weight_that_is_one_in_the_file_is_written_once(folders, saved, tmp_path) -> None:
    weights = load_file(folders["opt"] / "model.safetensors")
    embedding = "model.decoder.embed_tokens.weight"
    twice = weights | {"lm_head.weight": weights[embedding]}

    with closing(open_vector(prepared(saved("opt", twice), tmp_path).folder)) as vector:
        assert vector.on_disk
        assert "lm_head.weight" not in vector.buffers


def test_two_weights_that_a_config_ties_are_both_kept_where_the_file_has_two(
    folders, saved, tmp_path
) -> None:
    weights = load_file(folders["opt"] / "model.safetensors")
    other = weights["model.decoder.embed_tokens.weight"] + 1

    base = prepared(saved("opt", weights | {"lm_head.weight": other}), tmp_path)

    assert torch.equal(load_file(base.folder / "model.safetensors")["lm_head.weight"], other)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": torch.zeros(3, dtype=torch.int8)}, "a is stored as torch.int8, expected float32, float16 or"),
        ({"a": 3}, "a is stored as int, expected float32"),
        ([torch.zeros(3)], "holds no weights by name"),
    ],
)
def test_what_is_no_weight_is_named(saved, tmp_path, weights: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        prepared(saved("llama", weights), tmp_path)


@pytest.mark.parametrize("how", ["cut", "empty", "a file is gone"])
def test_a_bin_file_that_cannot_be_read_is_named_and_nothing_is_left(saved, tmp_path, how: str) -> None:
    folder = saved("llama", files=2 if how == "a file is gone" else 1)
    path = next(folder.glob("pytorch_model*.bin"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if how == "cut" else b"")
    if how == "a file is gone":
        path.unlink()

    with pytest.raises(ModelError, match=rf"{path.name} cannot be read"):
        prepared(folder, tmp_path)

    assert not (tmp_path / "run").exists()


def test_a_bin_file_that_would_run_code_is_refused(saved, tmp_path) -> None:
    folder = saved("gpt_neox", {"weight": Trap(tmp_path / "sprung")})

    for read in (load_model, lambda folder: prepared(folder, tmp_path)):
        with pytest.raises(
            ModelError, match=r"a \.bin file with more than tensors in it, which could be code$"
        ):
            read(folder)

    assert not (tmp_path / "sprung").exists()


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
