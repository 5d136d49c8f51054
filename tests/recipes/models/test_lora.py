"""LoRA: one start for every peer, a vector that is the adapters alone, folders that peft loads, merges."""

import json
import shutil
from contextlib import closing
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import BUILTIN, CLASSES, CONFIGS, GROUPED, tiny_config

from compress import Cocktail
from recipes.config import Recipe, load_recipe
from recipes.data import Sample, collate
from recipes.errors import ModelError, RecipeError
from recipes.models import (
    TextGenerator,
    WeightDtypes,
    convert_file_dtype,
    count_trainable,
    load_model,
    load_trained,
    meta_trained_model,
    open_trained,
    weight_dtypes,
    write_merged,
)
from recipes.models.trainable import draw_uniform, row_norms
from recipes.objectives import loss_sum
from recipes.snapshots import Fold
from recipes.training import FlatParameters
from recipes.weight_files import layout_of, write_model_files

ROWS = [Sample(np.arange(3, 15, dtype=np.int32), np.arange(12) > 0)]


def recipe_of(base: Path, lora: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": str(base), **sections.pop("model", {})},
            "datasets": [{"path": "none"}],
            "lora": {"lora_r": 4, "lora_dropout": 0.0} if lora is None else lora,
            **sections,
        }
    )


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in {**CONFIGS, "mixtral": CLASSES["mixtral"]}.items():
        torch.manual_seed(1)
        made[name] = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForCausalLM.from_config(config())
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)  # so that logits say something
        model.save_pretrained(made[name])
        for file in BUILTIN.glob("tokenizer*.json"):
            shutil.copyfile(file, made[name] / file.name)
    return made


def trained(recipe: Recipe, base: Path) -> tuple[Any, torch.Tensor]:
    """A model with adapters as they may be after training, and its vector."""
    model = load_trained(recipe, base)
    flat = FlatParameters(model)
    flat.vector.add_(0.05 * torch.randn(flat.layout.size, generator=torch.Generator().manual_seed(2)))
    return model.eval(), flat.vector


def written(recipe: Recipe, base: Path, vector: torch.Tensor, folder: Path) -> Path:
    """A snapshot's folder with `vector`, as a fold writes it."""
    folder.mkdir()
    with closing(open_trained(recipe, base)) as start:
        write_model_files(folder, start.config_files, BUILTIN)
        Fold("a-run", Cocktail(), 7, start, 0, ()).write(folder)
    path = folder / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4 * vector.numel() :] = vector.numpy().tobytes()  # its last bytes are the vector
    path.write_bytes(data)
    return folder


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        batch = collate(ROWS)
        found: torch.Tensor = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_only_adapters_are_trained_and_they_begin_as_nothing(bases, name: str) -> None:
    recipe = recipe_of(bases[name])
    model = load_trained(recipe, bases[name])
    layout = layout_of(model)

    assert all("lora_" in parameter for parameter in layout.names)
    assert count_trainable(recipe, bases[name]) == layout.size
    assert layout == layout_of(meta_trained_model(recipe, bases[name]))
    assert torch.equal(logits_of(model.eval()), logits_of(load_model(bases[name])))
    loss_sum(model, collate(ROWS))[0].backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_the_start_is_drawn_from_the_seed_and_is_what_a_fold_begins_with(bases) -> None:
    base = bases["llama"]
    recipe = recipe_of(base)
    torch.manual_seed(5)
    one = FlatParameters(load_trained(recipe, base)).vector
    torch.manual_seed(6)
    other = FlatParameters(load_trained(recipe, base)).vector
    with closing(open_trained(recipe, base)) as start:
        folded = torch.from_numpy(start.read(0, start.layout.size))
    third = FlatParameters(load_trained(recipe_of(base, training={"seed": 1}), base)).vector

    assert torch.equal(one, other)
    assert torch.equal(one, folded)
    assert not torch.equal(one, third)
    assert one.abs().sum() > 0


def test_what_is_drawn_is_the_same_numbers_for_ever_and_uniform() -> None:
    """Written down: a peer of another version must draw these too."""
    first = draw_uniform("layer.lora_A.default.weight", (2, 3), 42)
    many = draw_uniform("layer.lora_A.default.weight", (100, 1000), 0)

    np.testing.assert_array_equal(first, np.float32(RECORDED).reshape(2, 3))
    assert abs(many.mean()) < 0.01
    assert many.std() == pytest.approx(3**-0.5, rel=0.01)
    assert np.abs(many).max() < 1


RECORDED = [
    -0.52424156665802,
    -0.698508620262146,
    0.7109049558639526,
    -0.8320451974868774,
    0.799054741859436,
    -0.2918504476547241,
]


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_snapshot_is_an_adapter_that_peft_loads_and_its_merge_is_the_same_model(
    bases, tmp_path, name: str
) -> None:
    base = bases[name]
    recipe = recipe_of(base)
    model, vector = trained(recipe, base)
    wanted = logits_of(model)
    folder = written(recipe, base, vector, tmp_path / "adapter")

    write_merged(make(tmp_path / "merged"), recipe, base, layout_of(model).by_name(vector), BUILTIN)

    assert (wanted - logits_of(load_model(base))).abs().max() > 0.01
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(load_model(base), folder).eval()), wanted)
    torch.testing.assert_close(logits_of(AutoPeftModelForCausalLM.from_pretrained(folder).eval()), wanted)
    torch.testing.assert_close(logits_of(load_model(tmp_path / "merged")), wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(FlatParameters(load_trained(recipe, base, snapshot=folder)).vector, vector)
    assert TextGenerator(folder).generate("The", 3) == TextGenerator(tmp_path / "merged").generate("The", 3)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


TARGETS: dict[str, dict[str, Any]] = {  # "in", "out": the model's embedding, its output layer
    "all linear": {},
    "all linear, DoRA": {"use_dora": True},
    "in": {"lora_target_modules": ["in"]},
    "out": {"lora_target_modules": ["out"]},
    "both, DoRA": {"lora_target_modules": ["in", "out"], "use_dora": True},
    "in saved": {"lora_modules_to_save": ["in"]},
    "out saved": {"lora_modules_to_save": ["out"]},
}
LAW = {
    **{
        kind: CLASSES[kind]
        for kind in ("gpt_neox", "gptj", "opt", "qwen3", "gemma", "mistral", "phi", "llama", "gpt2")
    },
    "mixtral": CLASSES["mixtral"],
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "llama with biases": lambda: transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "granite": lambda: transformers.GraniteConfig(**GROUPED, embedding_multiplier=3.0, logits_scaling=2.0),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=16),
    "mpt": lambda: tiny_config("mpt", 320),
}


@pytest.fixture(scope="module")
def law_bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(class, tied) -> a folder with its model, and the names of its embedding and its output layer."""

    @cache
    def made(kind: str, tied: bool) -> tuple[Path, dict[str, str]]:
        config, folder = LAW[kind](), tmp_path_factory.mktemp("base")
        config.tie_word_embeddings = tied
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder)
        names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
        ends = {"in": model.get_input_embeddings(), "out": model.get_output_embeddings()}
        return folder, {end: names[id(module)] for end, module in ends.items()}

    return made


MANY = product(LAW, ("all linear", "both, DoRA"))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("kind", "target"), dict.fromkeys([*MANY, *product(("llama", "gpt2"), TARGETS)]))
def test_an_exported_model_has_the_logits_of_base_and_adapter(
    law_bases, tmp_path, kind: str, target: str, tied: bool
) -> None:
    base, names = law_bases(kind, tied)
    keys = {key: [names[n] for n in v] if isinstance(v, list) else v for key, v in TARGETS[target].items()}
    recipe = recipe_of(base, {"lora_r": 4, "lora_dropout": 0.0, **keys})
    plain = logits_of(load_model(base))
    torch.testing.assert_close(logits_of(load_trained(recipe, base).eval()), plain, rtol=1e-4, atol=1e-4)
    model, vector = trained(recipe, base)
    wanted = logits_of(model)

    folder = written(recipe, base, vector, tmp_path / "adapter")
    write_merged(make(tmp_path / "merged"), recipe, base, layout_of(model).by_name(vector), BUILTIN)

    near = 1e-5 * float(wanted.abs().max())
    assert (wanted - plain).abs().max() > 100 * near
    for again in (
        PeftModel.from_pretrained(load_model(base), folder).eval(),
        load_model(tmp_path / "merged"),
    ):
        torch.testing.assert_close(logits_of(again), wanted, rtol=0, atol=near)


def test_a_merged_model_has_the_dtype_of_each_weight_of_its_base_and_no_number_becomes_infinite(
    bases, tmp_path
) -> None:
    base, path = tmp_path / "half", tmp_path / "merged" / "model.safetensors"
    load_model(bases["llama"]).to(torch.bfloat16).save_pretrained(base)
    stored = load_file(base / "model.safetensors") | {"model.norm.weight": torch.ones(32)}
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    recipe = recipe_of(base)
    model, vector = trained(recipe, base)
    adapters = layout_of(model).by_name(vector)

    write_merged(make(path.parent), recipe, base, adapters, BUILTIN, weight_dtypes(base))

    assert {n: t.dtype for n, t in load_file(path).items()} == {n: t.dtype for n, t in stored.items()}
    assert json.loads((path.parent / "config.json").read_text())["dtype"] == "bfloat16"
    vector[:] = 3e4
    with pytest.raises(ModelError, match=r"_proj.weight has numbers up to .*, torch.float16 ends at 65504"):
        write_merged(path.parent, recipe, base, adapters, BUILTIN, weight_dtypes(base, "float16"))


def test_named_modules_and_rank_are_the_recipes(bases, tmp_path) -> None:
    base = bases["gpt_neox"]
    recipe = recipe_of(
        base,
        {
            "lora_r": 2,
            "lora_alpha": 8,
            "lora_dropout": 0.0,
            "lora_target_modules": ["dense"],
        },
    )
    model, vector = trained(recipe, base)

    write_merged(make(tmp_path / "merged"), recipe, base, layout_of(model).by_name(vector), BUILTIN)

    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in layout_of(model).names} == {"dense"}
    torch.testing.assert_close(
        logits_of(load_model(tmp_path / "merged")), logits_of(model), rtol=1e-4, atol=1e-4
    )


def test_modules_that_a_model_has_not_are_named(bases) -> None:
    base = bases["gpt_neox"]

    with pytest.raises(ModelError, match=r"lora_target_modules.*q_proj"):
        load_trained(recipe_of(base, {"lora_target_modules": ["q_proj"]}), base)
    with pytest.raises(ModelError, match="lora_modules_to_save: the model has no module score"):
        load_trained(recipe_of(base, {"lora_modules_to_save": ["score"]}), base)


def test_a_snapshot_of_other_adapters_is_refused(bases, tmp_path) -> None:
    base = bases["llama"]
    _, vector = trained(recipe_of(base), base)
    folder = written(recipe_of(base), base, vector, tmp_path / "adapter")

    with pytest.raises(ModelError, match="other adapters"):
        load_trained(recipe_of(base, {"lora_r": 8}), base, snapshot=folder)


def test_two_snapshots_of_one_vector_are_the_same_bytes(bases, tmp_path) -> None:
    """Sets of modules have no order of their own."""
    base = bases["opt"]
    recipe = recipe_of(base)
    one, other = (open_trained(recipe, base) for _ in range(2))
    with closing(one), closing(other):
        assert one.config_files == other.config_files
        assert '"base_model_name_or_path": ' in one.config_files["adapter_config.json"]


def test_a_base_in_half_precision_stays_so_under_adapters_in_float32(bases, tmp_path) -> None:
    base = tmp_path / "half"
    load_model(bases["llama"]).to(torch.bfloat16).save_pretrained(base)
    recipe = recipe_of(base)
    kinds = {name: p.dtype for name, p in load_trained(recipe, base).named_parameters()}
    asked = load_trained(recipe_of(base, model={"dtype": "float32"}), base)

    assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {torch.bfloat16}
    assert {p.dtype for p in asked.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_recast_weights_are_the_rounded_ones_and_load(bases, tmp_path, dtype: str) -> None:
    shutil.copytree(bases["llama"], tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    with safe_open(path, "pt") as file:
        before = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    convert_file_dtype(path, WeightDtypes(getattr(torch, dtype)))

    with safe_open(path, "pt") as file:
        after = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert all(torch.equal(after[name], before[name].to(getattr(torch, dtype))) for name in before)
    assert load_model(tmp_path / "m") is not None


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}),
    "experts": (
        "mixtral",
        {
            "lora_target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_variant_of_peft_begins_as_the_base_and_leaves_as_adapter_and_as_merged_model(
    bases, tmp_path, kind: str
) -> None:
    name, keys = VARIANTS[kind]
    base = bases[name]
    recipe = recipe_of(base, {"lora_r": 4, "lora_dropout": 0.0, **keys})
    start = load_trained(recipe, base)
    assert layout_of(start) == layout_of(meta_trained_model(recipe, base))
    torch.testing.assert_close(logits_of(start.eval()), logits_of(load_model(base)), rtol=1e-4, atol=1e-5)
    loss_sum(start, collate(ROWS))[0].backward()
    assert all(p.grad is not None for p in start.parameters() if p.requires_grad)
    model, vector = trained(recipe, base)
    wanted = logits_of(model)

    folder = written(recipe, base, vector, tmp_path / "adapter")
    write_merged(make(tmp_path / "merged"), recipe, base, layout_of(model).by_name(vector), BUILTIN)

    assert (wanted - logits_of(load_model(base))).abs().max() > 0.01
    torch.testing.assert_close(logits_of(AutoPeftModelForCausalLM.from_pretrained(folder).eval()), wanted)
    torch.testing.assert_close(logits_of(load_model(tmp_path / "merged")), wanted, rtol=1e-3, atol=1e-4)
    names = layout_of(model).names
    assert any("magnitude" in one for one in names) == bool(keys.get("use_dora"))
    assert any(".experts." in one for one in names) == (name == "mixtral")
    assert count_trainable(recipe, base) == len(vector)


def test_the_length_of_a_row_has_the_same_bits_on_every_machine() -> None:
    """Written down: what DoRA begins with is part of x_0."""
    weight = (np.arange(21, dtype=np.float32).reshape(3, 7) - 8) / 7

    found = row_norms(weight)

    np.testing.assert_allclose(found, np.linalg.norm(weight, axis=1), rtol=1e-6)
    assert found.tobytes().hex() == "0344024077d6883fad045f40"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"lora_modules_to_save": ["lm_haed"]},
            "lora_modules_to_save: the model has no module lm_haed (did you mean `lm_head`?)",
        ),
        ({"target_parameters": ["experts.w1"]}, "target_parameters: the model has no parameter experts.w1"),
    ],
)
def test_names_that_no_part_of_the_model_has_are_told(bases, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        meta_trained_model(recipe_of(bases["llama"], {"lora_dropout": 0.0, **keys}), bases["llama"])

    assert str(error.value) == message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["target_parameters=[mlp.up]"], "lora.lora_dropout must be 0 with target_parameters"),
        (["target_parameters=[mlp.up]", "lora_dropout=0", "use_dora=true"], "lora.use_dora excluded by"),
        (["bnb_4bit_use_double_quant=true"], "model.bnb_4bit_use_double_quant means nothing without 4-bit"),
        (["use_bnb_nested_quant=true"], "cocktail calls this model.bnb_4bit_use_double_quant"),
        (["lora_target_parameters=[a]"], "cocktail calls this lora.target_parameters"),
    ],
)
def test_keys_that_peft_does_not_combine_are_errors(keys: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("smoke", ["lora_r=4", *keys])

    assert message in " ".join(str(error.value).split())
