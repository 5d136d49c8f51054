"""Twelve classes of models train a step as peers do, leave as folders, and come back from `from_pretrained`.

Dense and of experts, with tied and with untied embeddings; an encoder-decoder is refused with a reason.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import BUILTIN, CLASSES, CONFIGS

from recipes.algorithm import compressor_of
from recipes.config import Recipe
from recipes.data import Sample
from recipes.errors import ModelError
from recipes.models import check_trainable, load_trained, open_trained, write_merged
from recipes.snapshots import Fold
from recipes.training import build_peer
from recipes.weight_files import check_weights, write_model_files

TIED = ("gemma", "gpt2", "opt", "qwen3_tied")
ROWS = [Sample(np.arange(3, 3 + n, dtype=np.int32), np.arange(n) > 1) for n in (12, 7)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            torch.manual_seed(1)
            folder = self[name] = tmp_path_factory.mktemp(name)
            transformers.AutoModelForCausalLM.from_config(CLASSES[name]()).save_pretrained(folder)
            return folder

    return Made()


def recipe_of(base: Path, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": str(base)},
            "datasets": [{"path": "none"}],
            "training": {"optim": "adamw_torch", "learning_rate": 1e-2},
            "compression": {"preset": "allreduce"},
            **sections,
        }
    )


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(12)[None]).logits
    return found


def stepped(recipe: Recipe, base: Path, out: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A peer takes one step and sends it: x', written as a run writes it, and its logits by the peer."""
    check_trainable(recipe, base)
    peer = build_peer(load_trained(recipe, base), recipe, 2)
    local, common = peer.trainer, peer.worker.global_model
    before = common.vector.clone()
    local.zero()
    assert local.backward([ROWS], local.objective.terms(ROWS)).mean > 0
    local.clip(1.0)
    local.step(1e-2)
    sent = peer.worker.start()
    common.move(sent)
    assert not torch.equal(common.vector, before)
    out.mkdir()
    with closing(open_trained(recipe, base)) as start:
        assert np.array_equal(start.read(0, start.layout.size), before.numpy())
        write_model_files(out, start.config_files, BUILTIN)
        mix = compressor_of(recipe.compression)
        Fold("a-run", mix, recipe.training.seed, start, 0, [memoryview(sent.packet)]).write(out)
    with local.flat.use(common.vector):
        return common.vector.clone(), logits_of(local.model)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_trains_in_full_and_its_snapshot_is_a_model_of_transformers(
    name: str, bases: Any, tmp_path: Path
) -> None:
    recipe = recipe_of(bases[name])

    _, wanted = stepped(recipe, bases[name], tmp_path / "out")

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(loaded), wanted, rtol=1e-5, atol=1e-6)
    tied = loaded.get_input_embeddings().weight.data_ptr() == loaded.get_output_embeddings().weight.data_ptr()
    assert tied == (name in TIED)


# test_lora.py has the others
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in CONFIGS])
def test_a_class_trains_adapters_and_merged_they_are_a_model_of_transformers(
    name: str, bases: Any, tmp_path: Path
) -> None:
    recipe, base = recipe_of(bases[name], lora={"lora_r": 2, "lora_dropout": 0.0}), bases[name]

    vector, wanted = stepped(recipe, base, tmp_path / "adapter")
    with closing(open_trained(recipe, base)) as start:
        adapters = start.layout.by_name(vector)
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "merged", recipe, base, adapters, BUILTIN)

    from peft import AutoPeftModelForCausalLM

    reloaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(reloaded), wanted, rtol=1e-5, atol=1e-6)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), wanted, rtol=1e-4, atol=1e-5)


def test_weights_that_the_config_has_no_place_for_are_told(bases: Any, tmp_path: Path) -> None:
    shutil.copytree(bases["llama"], tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "m/config.json").write_text(json.dumps(config))

    [warning] = check_weights(tmp_path / "m")

    assert "the model has no model.layers.1." in warning
    assert check_weights(bases["llama"]) == check_weights(bases["gpt2"]) == []


def test_an_encoder_decoder_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=320, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"a t5 model cannot learn to continue text"):
        check_trainable(recipe_of(tmp_path), tmp_path)
