"""Models: one vector of parameters, sums of losses, and folders that load again. All built tiny from their
configs."""

from __future__ import annotations

import errno
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from recipes.base import BUILTIN_MODELS, check_fit, load_tokenizer, manifest, open_tokenizer, prepare_base
from recipes.data import Sample, collate
from recipes.flat import Flat, Layout, layout_of
from recipes.hub import check_room
from recipes.model import evaluate, export, generate, load_model, loss_sum
from recipes.problems import HubUnreachable, ModelError
from recipes.recipe import load_recipe

BUILTIN = BUILTIN_MODELS["builtin:tiny-gpt-neox"]
VOCABULARY = 320
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NARROW = {"n_embd": 32, "n_layer": 2, "n_head": 2}

CONFIGS: dict[str, Any] = {
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON, **WIDTH, max_position_embeddings=64),
    "gptj": lambda: transformers.GPTJConfig(**COMMON, **NARROW, n_positions=64, rotary_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**COMMON, **NARROW, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        **COMMON, **WIDTH, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64
    ),
    "llama": lambda: transformers.LlamaConfig(
        **COMMON, **WIDTH, num_key_value_heads=1, max_position_embeddings=64
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON, **WIDTH, num_key_value_heads=1, head_dim=16, max_position_embeddings=64
    ),
}
TIED = ("gpt2", "opt")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder saved by `save_pretrained` for each architecture, with the builtin tokenizer."""
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp(name)
        transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(folder)
        for file in BUILTIN.glob("tokenizer*.json"):
            shutil.copyfile(file, folder / file.name)
        made[name] = folder
    return made


@pytest.fixture
def neox(folders: dict[str, Path]) -> Any:
    return load_model(folders["gpt_neox"])


@pytest.fixture
def samples() -> list[Sample]:
    """Of different lengths, with masks."""
    drawn = np.random.default_rng(0)
    made = []
    for length in (5, 12, 9, 2, 12):
        trained = drawn.random(length) < 0.7
        trained[0] = False
        made.append(Sample(drawn.integers(0, VOCABULARY, length).astype(np.int32), trained))
    return made


# ---- the vector ----------------------------------------------------------------------------------


def test_the_vector_and_the_parameters_are_the_same_memory(neox: Any) -> None:
    flat = Flat(neox)
    name, parameter = list(neox.named_parameters())[3]
    start = flat.layout.offsets[flat.layout.names.index(name)]

    flat.vector[start] = 7.0
    with torch.no_grad():
        parameter.view(-1)[1] = 8.0

    assert parameter.view(-1)[0].item() == 7.0
    assert flat.vector[start + 1].item() == 8.0
    assert flat.layout.size == sum(p.numel() for p in neox.parameters()) == flat.vector.numel()


@pytest.mark.parametrize("name", CONFIGS)
def test_turning_a_model_into_a_vector_changes_nothing_it_computes(folders, samples, name: str) -> None:
    model = load_model(folders[name])
    before = evaluate(model, samples, 2)

    Flat(model)

    assert evaluate(model, samples, 2) == before


def test_backward_fills_the_gradient_vector_and_adds_up_over_micro_batches(neox, samples) -> None:
    flat = Flat(neox)

    loss_sum(neox, collate(samples))[0].backward()
    whole = flat.grad.clone()
    flat.grad.zero_()
    for sample in samples:
        loss_sum(neox, collate([sample]))[0].backward()

    assert whole.abs().sum() > 0
    torch.testing.assert_close(flat.grad, whole, rtol=1e-4, atol=1e-5)


def test_an_optimizer_step_moves_the_vector(neox, samples) -> None:
    flat = Flat(neox)
    before = flat.vector.clone()
    loss_sum(neox, collate(samples))[0].backward()

    torch.optim.SGD(neox.parameters(), lr=0.5).step()

    torch.testing.assert_close(flat.vector, before - 0.5 * flat.grad)


def test_another_vector_can_be_lent_to_the_model_and_is_given_back(neox, samples) -> None:
    flat = Flat(neox)
    own, other = evaluate(neox, samples, 2), torch.zeros(flat.layout.size)

    with flat.use(other):
        uniform = evaluate(neox, samples, 2)
    with pytest.raises(RuntimeError), flat.use(other):
        raise RuntimeError

    assert uniform[0] / uniform[1] == pytest.approx(np.log(VOCABULARY), rel=1e-5)  # all weights zero
    assert evaluate(neox, samples, 2) == own
    assert next(neox.parameters()).data_ptr() == flat.vector.data_ptr()


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_stand_in_the_vector_once(folders, name: str) -> None:
    model = load_model(folders[name])
    layout = layout_of(model)

    assert not any("lm_head" in parameter for parameter in layout.names)
    assert layout.size == sum(p.numel() for p in model.parameters())


def test_models_that_are_loaded_by_several_threads_are_whole_and_so_is_transformers_after_it(folders) -> None:
    before = transformers.PreTrainedModel.tie_weights

    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(load_model, [folders["gpt2"]] * 8))

    assert transformers.PreTrainedModel.tie_weights is before
    assert all(model.lm_head.weight is model.transformer.wte.weight for model in loaded)


def test_a_vector_of_another_length_is_refused(neox) -> None:
    flat = Flat(neox)

    with pytest.raises(ModelError, match=r"vector of shape \(3,\)"), flat.use(torch.zeros(3)):
        pass


def test_a_model_in_half_precision_or_without_parameters_is_refused(neox) -> None:
    with pytest.raises(ModelError, match="expected float32"):
        Flat(torch.nn.Linear(2, 2).half())
    with pytest.raises(ModelError, match="no trainable parameter"):
        Flat(neox.requires_grad_(False))


def test_what_is_frozen_is_not_in_the_vector(neox, samples) -> None:
    neox.get_input_embeddings().requires_grad_(False)
    flat = Flat(neox)

    assert flat.layout.size < sum(p.numel() for p in neox.parameters())
    assert "gpt_neox.embed_in.weight" not in flat.layout.names
    loss_sum(neox, collate(samples))[0].backward()
    assert flat.grad.abs().sum() > 0


@given(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6))
def test_every_coordinate_has_a_name_and_the_views_tile_the_vector(shapes: list[tuple[int, ...]]) -> None:
    layout = Layout(tuple(f"p{i}" for i in range(len(shapes))), tuple(shapes))
    vector = torch.arange(layout.size, dtype=torch.float32)

    for name, view in zip(layout.names, layout.views(vector), strict=True):
        assert {layout.name_at(int(i)) for i in view.reshape(-1)} == {name}
    assert torch.equal(torch.cat([v.reshape(-1) for v in layout.views(vector)]), vector)
    with pytest.raises(IndexError):
        layout.name_at(layout.size)


# ---- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_is_transformers_own_times_its_terms(folders, samples, name: str) -> None:
    model = load_model(folders[name])
    batch = collate(samples)

    loss, tokens = loss_sum(model, batch)

    assert tokens == sum(sample.count for sample in samples)
    assert loss.item() == pytest.approx(model(**batch).loss.item() * tokens, rel=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_a_sample_does_not_depend_on_its_company(folders, samples, name: str) -> None:
    model = load_model(folders[name])

    together, tokens = evaluate(model, samples, batch_size=5, pad=3)
    alone, terms = evaluate(model, samples, batch_size=1)

    assert tokens == terms
    assert together == pytest.approx(alone, rel=1e-5)


def test_evaluation_leaves_the_model_in_its_mode_and_without_gradients(neox, samples) -> None:
    neox.train()
    flat = Flat(neox)

    evaluate(neox, samples, 2)

    assert neox.training
    assert flat.grad.count_nonzero() == 0


# ---- in and out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_folder_loads_and_loses_what_the_vector_lost(
    folders, samples, tmp_path, name: str
) -> None:
    model = load_model(folders[name])
    flat = Flat(model)
    vector = flat.vector + 0.01 * torch.randn(flat.layout.size, generator=torch.Generator().manual_seed(0))
    with flat.use(vector):
        wanted = evaluate(model, samples, 2)

    out = export(tmp_path / "out", folders[name], vector, flat.layout)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert evaluate(loaded, samples, 2) == wanted
    assert torch.equal(Flat(loaded).vector, vector)
    assert tokenizer.decode(tokenizer("Hello there")["input_ids"]) == "Hello there"
    assert list(tmp_path.iterdir()) == [out]  # nothing is left beside it


def test_a_model_with_weights_in_bin_files_only_is_read_as_tensors(folders, tmp_path, samples) -> None:
    folder = tmp_path / "bin"
    shutil.copytree(folders["gpt_neox"], folder)
    model = load_model(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    assert evaluate(load_model(folder), samples, 2) == evaluate(model, samples, 2)
    assert "pytorch_model.bin" in [file.name for file in manifest(folder)]


def test_a_bin_file_that_would_run_code_is_refused(folders, tmp_path) -> None:
    folder = tmp_path / "evil"
    shutil.copytree(folders["gpt_neox"], folder)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")

    with pytest.raises(ModelError):
        load_model(folder)

    assert not (tmp_path / "sprung").exists()


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_folder_that_lacks_a_weight_is_refused_and_not_filled_at_random(folders, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "short"
    shutil.copytree(folders["gpt_neox"], folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("embed_out.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match="the weights lack"):
        load_model(folder)


def test_a_layout_of_another_model_is_refused_at_the_export(folders, tmp_path) -> None:
    layout = layout_of(load_model(folders["gpt2"]))

    with pytest.raises(ModelError, match="other parameters"):
        export(tmp_path / "out", folders["gpt_neox"], torch.zeros(layout.size), layout)
    assert not (tmp_path / "out").exists()


def test_a_model_writes_on_from_a_prompt_and_greedily_always_the_same(folders) -> None:
    first = generate(folders["gpt_neox"], "Hello", max_new_tokens=8)
    sampled = generate(folders["gpt_neox"], "Hello", max_new_tokens=8, temperature=1.0, seed=1)

    assert first == generate(folders["gpt_neox"], "Hello", max_new_tokens=8)
    assert sampled == generate(folders["gpt_neox"], "Hello", max_new_tokens=8, temperature=1.0, seed=1)
    assert not first.startswith("Hello")
    assert isinstance(generate(folders["gpt_neox"], "", max_new_tokens=2), str)


# ---- the base ------------------------------------------------------------------------------------


def test_the_builtin_model_is_drawn_from_the_seed_and_from_nothing_else(tmp_path) -> None:
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    first = prepare_base(load_recipe("smoke"), tmp_path / "a")

    assert torch.equal(torch.rand(1), drawn)  # our draw has not moved the caller's
    assert prepare_base(load_recipe("smoke"), tmp_path / "b").files == first.files
    assert prepare_base(load_recipe("smoke"), tmp_path / "a").files == first.files
    assert prepare_base(load_recipe("smoke", ["seed=7"]), tmp_path / "c").files != first.files
    assert {file.name for file in first.files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert first.bytes == sum((first.folder / file.name).stat().st_size for file in first.files)


def test_a_local_folder_is_used_where_it_is_and_code_in_it_is_no_part_of_the_base(folders, tmp_path) -> None:
    (folders["llama"] / "modeling_evil.py").write_text("raise SystemExit")
    base = prepare_base(load_recipe("smoke", model=str(folders["llama"])), tmp_path / "unused")

    assert base.folder == folders["llama"]
    assert not (tmp_path / "unused").exists()
    assert "modeling_evil.py" not in [file.name for file in base.files]


def test_what_is_missing_is_named(folders, tmp_path) -> None:
    def message(model: str) -> str:
        with pytest.raises(ModelError) as caught:
            prepare_base(load_recipe("smoke", model=model), tmp_path / "base")
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    shutil.copyfile(folders["gpt2"] / "config.json", tmp_path / "bare" / "config.json")

    assert message("./missing") == "no such model folder: ./missing"
    assert "no config.json" in message(str(tmp_path / "empty"))
    assert "no weights" in message(str(tmp_path / "bare"))
    assert message("builtin:huge") == "no builtin model `builtin:huge`; there is builtin:tiny-gpt-neox"


def test_a_hub_that_does_not_answer_is_told_as_that(tmp_path) -> None:
    with pytest.raises(HubUnreachable, match="the hub did not answer for nobody/nothing"):
        prepare_base(load_recipe("smoke", model="nobody/nothing"), tmp_path / "base")


def test_a_hub_model_in_the_cache_is_used_when_the_hub_does_not_answer(
    folders, tmp_path, monkeypatch
) -> None:
    entry = tmp_path / "models--EleutherAI--pythia-70m"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folders["gpt_neox"], entry / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    recipe = load_recipe("pythia-70m", ["tokenizer_name_or_path=EleutherAI/pythia-70m"])

    base = prepare_base(recipe, tmp_path / "unused")

    assert base.files == manifest(folders["gpt_neox"])
    assert len(load_tokenizer(recipe.model, base.folder)) == VOCABULARY


def test_what_the_hub_says_no_to_is_told_with_what_to_do(tmp_path, monkeypatch) -> None:
    from huggingface_hub import errors

    def message(kind: type[Exception]) -> str:
        def model_info(self: object, *_: object, **__: object) -> None:
            raise kind.__new__(kind)  # without __init__, which wants the hub's answer

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
        with pytest.raises(ModelError) as caught:
            prepare_base(load_recipe("smoke", ["model_revision=v9", "model_name_or_path=a/b"]), tmp_path)
        return str(caught.value)

    assert "accept the licence at https://huggingface.co/a/b, then `hf auth login`" in message(
        errors.GatedRepoError
    )
    assert "a/b: no such folder, and no such model on the hub (hint: " in message(
        errors.RepositoryNotFoundError
    )
    assert "a/b has no revision v9, or no longer" in message(errors.RevisionNotFoundError)


def test_a_disk_without_room_for_a_hub_model_is_found_out_before_the_first_byte(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    check_room("a/b", "0" * 40, {"config.json": 800})
    with pytest.raises(OSError, match=r"a/b has 1000.0 GB that are not here") as full:
        check_room("a/b", "0" * 40, {"config.json": 800, "model.safetensors": 10**12})

    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "cache"))


def test_a_name_that_is_neither_folder_nor_hub_id_is_told(tmp_path) -> None:
    with pytest.raises(ModelError, match="neither a folder nor the id of a model"):
        prepare_base(load_recipe("smoke", model="my model!"), tmp_path / "base")


def test_a_config_that_is_no_causal_language_model_is_told(folders, tmp_path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(folders["gpt2"], folder)
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')

    with pytest.raises(ModelError, match="cannot load this as a causal language model"):
        load_model(folder)


def test_sdpa_is_refused_for_gpt_j_which_has_none(folders) -> None:
    with pytest.raises(ModelError, match=r"scaled_dot_product_attention|sdpa"):
        load_model(folders["gptj"], attn_implementation="sdpa")


# ---- the tokenizer -------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_told_and_another_one_can_be_named(folders, tmp_path) -> None:
    folder = tmp_path / "mute"
    shutil.copytree(folders["gpt2"], folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(
        ModelError, match=r"no tokenizer in this folder \(hint: model.tokenizer_name_or_path="
    ):
        load_tokenizer(load_recipe("smoke").model, folder)
    for source in ("builtin:tiny-gpt-neox", str(folders["llama"])):
        recipe = load_recipe("smoke", [f"tokenizer_name_or_path={source}"])
        assert len(load_tokenizer(recipe.model, folder)) == VOCABULARY


def test_the_pad_token_is_the_one_asked_for_else_the_tokenizers_else_its_end_token(tmp_path) -> None:
    shutil.copytree(BUILTIN, tmp_path / "t")
    settings = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(settings))

    assert open_tokenizer(tmp_path / "t").pad_token == "<|endoftext|>"
    assert open_tokenizer(tmp_path / "t", "a").pad_token == "a"
    with pytest.raises(ModelError, match="`<pad>` is not a token"):
        open_tokenizer(tmp_path / "t", "<pad>")
    settings.pop("eos_token")
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="neither a pad nor an eos token"):
        open_tokenizer(tmp_path / "t")


def test_ids_outside_the_embedding_and_samples_over_the_context_are_refused(folders, tmp_path) -> None:
    tokenizer = open_tokenizer(folders["gpt2"])

    check_fit(load_recipe("smoke", ["max_length=64"]), folders["gpt2"], tokenizer)
    with pytest.raises(ModelError, match="max_length is 65, the model's context only 64"):
        check_fit(load_recipe("smoke", ["max_length=65"]), folders["gpt2"], tokenizer)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="has 321 tokens, the model's embedding only 320"):
        check_fit(load_recipe("smoke", ["max_length=64"]), folders["gpt2"], tokenizer)
