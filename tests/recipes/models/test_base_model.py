"""The folder that a run starts from: fetched, made or found, with a tokenizer that fits."""

import json
import shutil
from contextlib import closing, nullcontext

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import BUILTIN, CLASSES, VOCABULARY, tiny_config

from recipes.config import load_recipe
from recipes.errors import HubUnreachable, ModelError
from recipes.models import (
    base_manifest,
    check_fit,
    configs_with_eos,
    context_of,
    layers_of,
    load_model,
    load_tokenizer,
    open_tokenizer,
    open_vector,
    prepare_base,
    vocabulary_of,
    width_of,
)
from recipes.models.trainable import visible_by_config

GPTQ = {"quant_method": "gptq", "bits": 4}

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


def test_a_hub_that_does_not_answer_is_reported_as_that(tmp_path) -> None:
    with pytest.raises(
        HubUnreachable, match="no folder nobody/nothing here, none in the cache, and the hub did not answer"
    ):
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

    assert base.files == base_manifest(folders["gpt_neox"])
    assert len(load_tokenizer(recipe.model, base.folder)) == VOCABULARY


def test_a_name_that_is_neither_folder_nor_hub_id_is_reported(tmp_path) -> None:
    with pytest.raises(ModelError, match="neither a folder nor the id of a model"):
        prepare_base(load_recipe("smoke", model="my model!"), tmp_path / "base")


def test_a_config_that_is_no_causal_language_model_is_reported(folders, tmp_path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(folders["gpt2"], folder)
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')

    with pytest.raises(ModelError, match="cannot load this config"):
        load_model(folder)


def test_sdpa_is_refused_for_gpt_j_which_has_none(folders) -> None:
    with pytest.raises(ModelError, match=r"scaled_dot_product_attention|sdpa"):
        load_model(folders["gptj"], attn_implementation="sdpa")


# ---- the tokenizer -------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_is_reported_and_another_one_can_be_named(folders, tmp_path) -> None:
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


def test_the_eos_token_is_the_one_asked_for_and_the_exported_config_ends_with_it_too() -> None:
    model = load_recipe("smoke", ["eos_token=</a>"]).model
    with pytest.raises(ModelError, match=r"model.eos_token `</a>` is not a token of"):
        load_tokenizer(model, BUILTIN)
    model = load_recipe("smoke", ["eos_token='!'"]).model
    texts = {"config.json": '{"eos_token_id": 0}', "generation_config.json": '{"eos_token_id": [7, 0]}'}

    tokenizer = load_tokenizer(model, BUILTIN)

    assert (tokenizer.eos_token, tokenizer.pad_token) == ("!", "<|endoftext|>")
    assert configs_with_eos(texts, load_recipe("smoke").model, BUILTIN) == texts
    assert configs_with_eos({"x": "y"}, model, BUILTIN) == {"x": "y"}  # an adapter has no config of its own


def test_exported_configs_keep_their_other_eos_tokens(tmp_path) -> None:
    model = load_recipe("smoke", ["eos_token='!'"]).model
    tokenizer = load_tokenizer(model, BUILTIN)
    tokenizer.save_pretrained(tmp_path)
    eos = tokenizer.convert_tokens_to_ids("!")

    def changed(**texts: dict) -> list:
        files = {f"{name}.json": json.dumps(values) for name, values in texts.items()}
        made = configs_with_eos(files, model, tmp_path)
        return [json.loads(made[f"{name}.json"]) for name in ("config", "generation_config")]

    one = {"eos_token_id": eos}
    assert changed(config={"eos_token_id": 0}) == [one, {"eos_token_id": [eos, 0]}]
    assert changed(config={}, generation_config={"top_k": 5}) == [one, {"eos_token_id": [eos], "top_k": 5}]
    assert changed(config=one, generation_config={"eos_token_id": [7, eos]})[1] == {"eos_token_id": [eos, 7]}
    assert changed(config={"text_config": {"eos_token_id": 0}})[0] == {"text_config": one}


def test_weights_that_are_codes_are_refused_by_their_kind_and_numbers_are_not(folders, tmp_path) -> None:
    """Transformers leaves the word of a GGUF, or of codes that were unpacked, in the config of numbers."""
    folder, recipe = tmp_path / "codes", load_recipe("smoke", ["max_length=32"])
    shutil.copytree(folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    # the file is replaced
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    check_fit(recipe, folder)
    assert torch.equal(load_model(folder).lm_head.weight, tensors["lm_head.weight"])
    with closing(open_vector(folder)) as vector:
        assert "quantization_config" not in json.loads(vector.config_files["config.json"])

    for quantized, name, dtype in (
        (GPTQ, "qweight", torch.int32),
        (GPTQ | {"quant_method": "awq"}, "qweight", torch.int32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "weight", torch.uint8),
        ({"load_in_4bit": True}, "weight", torch.uint8),  # an older form
    ):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
        codes = tensors | {f"model.layers.0.mlp.up_proj.{name}": torch.zeros(4, 4, dtype=dtype)}
        save_file(codes, folder / "model.safetensors", {"format": "pt"})
        method = quantized.get("quant_method", "quantized")
        with pytest.raises(ModelError, match=f"are {method} codes, not numbers") as refused:
            check_fit(recipe, folder)
        assert "model.load_in_4bit=true" in refused.value.hints[0]
    (folder / "config.json").write_text(json.dumps(config))
    for kind, called in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save_file({n: t.to(kind) for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        for opened in (load_model, open_vector):
            with pytest.raises(ModelError, match=f"is stored as {called}, expected float32, float16 or bfl"):
                opened(folder)


def test_samples_over_the_context_are_refused_whatever_the_config_calls_it(folders, tmp_path) -> None:
    """A tokenizer may have more tokens than the embedding: rows that have one are refused, not the model."""
    text = {"max_position_embeddings": 48, "vocab_size": 9, "num_hidden_layers": 3, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tiny_config("mpt", max_seq_len=40).save_pretrained(tmp_path / "mpt")

    check_fit(load_recipe("smoke", ["max_length=64"]), folders["gpt2"])
    with pytest.raises(ModelError, match="max_length is 65, the model's context only 64"):
        check_fit(load_recipe("smoke", ["max_length=65"]), folders["gpt2"])
    assert (context_of(tmp_path), context_of(tmp_path / "mpt")) == (48, 40)
    assert (vocabulary_of(tmp_path), layers_of(tmp_path), width_of(tmp_path)) == (9, 3, 8)


@pytest.mark.parametrize("kind", [*CLASSES, "gpt_neox_japanese", "xlnet", "bert"])
def test_whether_tokens_see_later_ones_is_tried_out_and_not_read(tmp_path, kind: str) -> None:
    """Flags call GPT-NeoX-Japanese an encoder, and say nothing of XLNet."""
    if kind in CLASSES:
        CLASSES[kind]().save_pretrained(tmp_path)
    else:
        transformers.AutoConfig.for_model(kind, vocab_size=320).save_pretrained(tmp_path)
    recipe = load_recipe("smoke", ["max_length=32", "packing=false"])

    with (
        nullcontext() if kind not in ("xlnet", "bert") else pytest.raises(ModelError, match="see later ones")
    ):
        check_fit(recipe, tmp_path)
    assert visible_by_config(tmp_path) is not None
