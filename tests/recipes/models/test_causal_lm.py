"""Models: one vector of parameters, sums of losses, and folders that load again. All built tiny from their
configs."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from exported import export
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import CONFIGS, TIED, VOCABULARY

from recipes.data import Sample, collate
from recipes.errors import ModelError
from recipes.models import TextGenerator, load_model
from recipes.objectives import NextTokens, evaluate, loss_sum
from recipes.training import FlatParameters
from recipes.weight_files import Layout, layout_of


@pytest.fixture
def neox(folders: dict[str, Path]) -> Any:
    return load_model(folders["gpt_neox"])


@pytest.fixture
def samples() -> list[Sample]:
    """Samples of different lengths, with masks."""
    drawn = np.random.default_rng(0)
    made = []
    for length in (5, 12, 9, 2, 12):
        trained = drawn.random(length) < 0.7
        trained[0] = False
        made.append(Sample(drawn.integers(0, VOCABULARY, length).astype(np.int32), trained))
    return made


# ---- the vector ----------------------------------------------------------------------------------


def test_the_vector_and_the_parameters_are_the_same_memory(neox: Any) -> None:
    flat = FlatParameters(neox)
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
    before = evaluate(NextTokens(), model, samples, 2)

    FlatParameters(model)

    assert evaluate(NextTokens(), model, samples, 2) == before


def test_backward_fills_the_gradient_vector_and_adds_up_over_micro_batches(neox, samples) -> None:
    flat = FlatParameters(neox)

    loss_sum(neox, collate(samples))[0].backward()
    whole = flat.grad.clone()
    flat.grad.zero_()
    for sample in samples:
        loss_sum(neox, collate([sample]))[0].backward()

    assert whole.abs().sum() > 0
    torch.testing.assert_close(flat.grad, whole, rtol=1e-4, atol=1e-5)


def test_an_optimizer_step_moves_the_vector(neox, samples) -> None:
    flat = FlatParameters(neox)
    before = flat.vector.clone()
    loss_sum(neox, collate(samples))[0].backward()

    torch.optim.SGD(neox.parameters(), lr=0.5).step()

    torch.testing.assert_close(flat.vector, before - 0.5 * flat.grad)


def test_another_vector_can_be_lent_to_the_model_and_is_given_back(neox, samples) -> None:
    flat = FlatParameters(neox)
    own, other = evaluate(NextTokens(), neox, samples, 2), torch.zeros(flat.layout.size)

    with flat.use(other):
        uniform = evaluate(NextTokens(), neox, samples, 2)
    with pytest.raises(RuntimeError), flat.use(other):
        raise RuntimeError

    assert uniform.mean == pytest.approx(np.log(VOCABULARY), rel=1e-5)  # all weights zero
    assert evaluate(NextTokens(), neox, samples, 2) == own
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
    flat = FlatParameters(neox)

    with pytest.raises(ModelError, match=r"vector of shape \(3,\)"), flat.use(torch.zeros(3)):
        pass


def test_a_model_in_half_precision_or_without_parameters_is_refused(neox) -> None:
    with pytest.raises(ModelError, match="expected float32"):
        FlatParameters(torch.nn.Linear(2, 2).half())
    with pytest.raises(ModelError, match="no trainable parameter"):
        FlatParameters(neox.requires_grad_(False))


def test_what_is_frozen_is_not_in_the_vector(neox, samples) -> None:
    neox.get_input_embeddings().requires_grad_(False)
    flat = FlatParameters(neox)

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

    together, tokens = loss_sum(model, collate(samples, pad=3))
    alone = evaluate(NextTokens(), model, samples, 1)

    assert tokens == alone.terms
    assert float(together) == pytest.approx(alone.loss_sum, rel=1e-5)


def test_evaluation_leaves_the_model_in_its_mode_and_without_gradients(neox, samples) -> None:
    neox.train()
    flat = FlatParameters(neox)

    evaluate(NextTokens(), neox, samples, 2)

    assert neox.training
    assert flat.grad.count_nonzero() == 0


# ---- in and out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_folder_loads_and_loses_what_the_vector_lost(
    folders, samples, tmp_path, name: str
) -> None:
    model = load_model(folders[name])
    flat = FlatParameters(model)
    vector = flat.vector + 0.01 * torch.randn(flat.layout.size, generator=torch.Generator().manual_seed(0))
    with flat.use(vector):
        wanted = evaluate(NextTokens(), model, samples, 2)

    out = export(tmp_path / "out", folders[name], vector, flat.layout)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert evaluate(NextTokens(), loaded, samples, 2) == wanted
    assert torch.equal(FlatParameters(loaded).vector, vector)
    assert tokenizer.decode(tokenizer("Hello there")["input_ids"]) == "Hello there"
    assert list(tmp_path.iterdir()) == [out]  # nothing is left beside it


def test_a_model_with_weights_in_bin_files_only_is_read_as_tensors(folders, tmp_path, samples) -> None:
    folder = tmp_path / "bin"
    shutil.copytree(folders["gpt_neox"], folder)
    model = load_model(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    assert evaluate(NextTokens(), load_model(folder), samples, 2) == evaluate(NextTokens(), model, samples, 2)


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
    first = TextGenerator(folders["gpt_neox"]).generate("Hello", max_new_tokens=8)
    sampled = TextGenerator(folders["gpt_neox"]).generate("Hello", max_new_tokens=8, temperature=1.0, seed=1)

    assert first == TextGenerator(folders["gpt_neox"]).generate("Hello", max_new_tokens=8)
    assert sampled == TextGenerator(folders["gpt_neox"]).generate(
        "Hello", max_new_tokens=8, temperature=1.0, seed=1
    )
    assert not first.startswith("Hello")
    assert isinstance(TextGenerator(folders["gpt_neox"]).generate("", max_new_tokens=2), str)
