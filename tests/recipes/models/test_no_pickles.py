"""Files from a hub or a peer are data: none of them is unpickled, whatever it is called."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cocktail_cli.errors import Failure
from cocktail_cli.volunteer import check_files
from recipes.config import load_recipe
from recipes.errors import ModelError
from recipes.models import load_model, open_vector, prepare_base
from transport.protocol import messages

ROOT = Path(__file__).parents[3]
ROOMS = ("compress", "transport", "recipes", "cocktail_cli")
UNPICKLING = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle")
LOADS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}
CONVERSION = "recipes/models/base_model.py"


def sources() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def calls(tree: ast.AST) -> Iterator[tuple[tuple[str, str], ast.Call]]:
    """Every call of a name, or of a name's attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name):
                yield (node.func.value.id, node.func.attr), node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield ("", node.func.id), node


def test_the_product_unpickles_nowhere_but_where_a_launch_converts_its_own_model() -> None:
    imported, loads = set(), {}
    for path, tree in sources():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {(path, name) for name in names if name.split(".")[0] in UNPICKLING}
        for called, call in calls(tree):
            if called in LOADS or called in {("", "eval"), ("", "exec"), ("", "load_bin")}:
                loads[path, called] = call

    assert imported == set()
    assert set(loads) == {(CONVERSION, ("torch", "load")), (CONVERSION, ("", "load_bin"))}


def test_that_conversion_opens_tensors_alone_and_no_peer_and_no_resumed_run_gets_there() -> None:
    asked: dict[str, set[str]] = {"convert_bin_folder": set(), "prepare_base": set()}
    for path, tree in sources():
        for called, call in calls(tree):
            if path == CONVERSION and called == ("torch", "load"):
                assert any(k.arg == "weights_only" and k.value.value is True for k in call.keywords)  # type: ignore[attr-defined]
            if called[1] in asked:
                asked[called[1]].add(path)

    assert asked["convert_bin_folder"] == {"recipes/models/base_model.py"}
    assert not [path for path in asked["prepare_base"] if "volunteer" in path or "resume" in path]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "x.ckpt", "a.bin.json.bin"])
def test_a_hub_that_offers_a_pickle_is_refused(name: str) -> None:
    with pytest.raises(Failure, match="the run offers a file"):
        check_files([messages.File(name, 10, "0" * 64, "0" * 64)])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_base(load_recipe("smoke"), tmp_path_factory.mktemp("made") / "base").folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_model(folder).state_dict().items()}


@pytest.mark.parametrize(
    "shard", ["../first/spiece.model", "first/spiece.model", "vocab.txt", "a.bin", "a\\b.bin"]
)
def test_an_index_that_leads_to_a_pickle_is_refused(base: Path, tmp_path: Path, shard: str) -> None:
    """A hub may name and send `.model` and `.txt`. Transformers joins the path of a shard to the folder,
    and unpickles what is not called `.safetensors`: of another run's files, where those of this one were
    looked at.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    weights = weights_of(base)
    for folder in (first, second):
        folder.mkdir()
        (folder / "config.json").write_text((base / "config.json").read_text())
    pickled = second / shard
    pickled.parent.mkdir(parents=True, exist_ok=True)
    if shard != Path(shard).name:
        save_file(weights, second / Path(shard).name)  # which is looked at
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, pickled)
    save_file(weights, second / "model-1.safetensors")  # so that it looks like a model's folder
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (second / "model.safetensors.index.json").write_text(json.dumps(index))
    sent = ("spiece.model", "vocab.txt", "model-1.safetensors", "model.safetensors.index.json")
    check_files([messages.File(name, 1, "0" * 64, "0" * 64) for name in sent])

    for load in (load_model, open_vector):
        with pytest.raises(ModelError, match="which is no safetensors file"):
            load(second)


def test_a_pickle_beside_safetensors_is_never_looked_at(base: Path, tmp_path: Path) -> None:
    weights = weights_of(base)
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(tmp_path).items())
