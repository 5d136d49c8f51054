"""Every shipped recipe on its model's own class, at a tiny size, with rows as its data sets have them."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from real_configs import COUNTS, REAL
from tiny_models import SIZES

from cocktail_cli.assembly import recipe_type
from cocktail_cli.machine import RUNTIME
from cocktail_cli.ui import megabytes
from cocktail_cli.volunteer import NOMINAL
from recipes.config import Recipe, list_recipes, load_recipe
from recipes.config.loader import recipe_path
from recipes.data import build_corpus
from recipes.models import (
    BUILTIN_MODELS,
    check_fit,
    config_folder,
    load_tokenizer,
    load_trained,
    meta_trained_model,
    open_tokenizer,
    prepare_base,
)
from recipes.planning import Machine, packet_bytes, plan_memory
from recipes.training import build_peer
from recipes.weight_files import layout_of

LIBRARY = {recipe.name: recipe for recipe in list_recipes(recipe_type) if recipe.datasets}
TALK = [
    {"role": "user", "content": "What is a cocktail?"},
    {"role": "assistant", "content": "A drink of several things."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Better not."},
]
SHAREGPT = [
    {"from": m["role"].replace("user", "human").replace("assistant", "gpt"), "value": m["content"]}
    for m in TALK
]

# hub id -> a row of it
ROWS: dict[str, dict[str, Any]] = {
    "HuggingFaceH4/ultrachat_200k": {"prompt": "What is", "prompt_id": "a1", "messages": TALK},
    "Muennighoff/P3": {"inputs": "Is this true?", "targets": "Yes"},
    "Muennighoff/natural-instructions": {
        "task_name": "task001",
        "id": "task001-1",
        "definition": "Answer the question.",
        "inputs": "What is two and two?",
        "targets": "four",
    },
    "Salesforce/wikitext": {"text": " Robert Boulter is an English film , television and theatre actor . \n"},
    "databricks/databricks-dolly-15k": {
        "instruction": "Name a drink.",
        "context": "",
        "response": "Water.",
        "category": "open_qa",
    },
    "mlabonne/FineTome-100k": {"conversations": SHAREGPT, "source": "x", "score": 5.1},
    "monology/pile-uncopyrighted": {"text": "It was a dark night.", "meta": {"pile_set_name": "Books3"}},
    "trl-lib/ultrafeedback_binarized": {
        "chosen": TALK[:2],
        "rejected": [TALK[0], TALK[3]],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
    "openai/gsm8k": {"question": "What is 2 + 2?", "answer": "It is 2 + 2 = 4. #### 4"},
}

# model id -> the tokens and the template that its tokenizer has; its config is in real_configs.py
MODELS: dict[str, tuple[dict[str, str], str | None]] = {
    "EleutherAI/gpt-j-6b": ({"eos": "<|endoftext|>", "bos": "<|endoftext|>"}, None),
    "EleutherAI/gpt-neox-20b": ({"eos": "<|endoftext|>", "bos": "<|endoftext|>"}, None),
    "EleutherAI/pythia-70m": ({"eos": "<|endoftext|>", "bos": "<|endoftext|>"}, None),
    "HuggingFaceTB/SmolLM2-1.7B": ({"eos": "<|endoftext|>", "bos": "<|endoftext|>"}, None),
    "Qwen/Qwen3-0.6B": ({"eos": "<|im_end|>", "pad": "<|endoftext|>"}, "qwen3"),
    "Qwen/Qwen3-1.7B": ({"eos": "<|im_end|>", "pad": "<|endoftext|>"}, "qwen3"),
    "Qwen/Qwen3-8B": ({"eos": "<|im_end|>", "pad": "<|endoftext|>"}, "qwen3"),
    "facebook/opt-1.3b": ({"bos": "</s>", "eos": "</s>", "pad": "<pad>"}, None),
    "meta-llama/Llama-3.1-8B-Instruct": ({"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}, "llama3_1"),
    "meta-llama/Llama-3.2-1B-Instruct": ({"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}, "llama3_2"),
}


def twin(name: str, folder: Path) -> None:
    """A folder as that of model `name`, without weights: its config at a tiny size, its special tokens, its
    chat template.
    """
    tokens, template = MODELS[name]
    tokenizer: Any = open_tokenizer(BUILTIN_MODELS["builtin:tiny-gpt-neox"])
    tokenizer.pad_token = None
    tokenizer.add_special_tokens({f"{role}_token": token for role, token in tokens.items()})
    if template is not None:
        spec = find_spec("trl")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        places = Path(spec.submodule_search_locations[0]) / "chat_templates"
        tokenizer.chat_template = (places / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    ends = {f"{role}_token_id": tokenizer.convert_tokens_to_ids(token) for role, token in tokens.items()}
    small = {**REAL[name], **SIZES[REAL[name]["model_type"]], "vocab_size": 384, **ends}
    (folder / "config.json").write_text(json.dumps(small))


def twin_of(recipe: Recipe, folder: Path, *more: str) -> Recipe:
    """The recipe on a tiny twin of its model and on a few rows like those of its data."""
    overrides = ["max_steps=2", "global_batch_size=4", "val_set_size=1"]
    if recipe.model.model_name_or_path in MODELS:
        twin(recipe.model.model_name_or_path, folder)
        overrides.append(f"model_name_or_path={folder}")
    for number, dataset in enumerate(recipe.datasets):
        if dataset.path in ROWS:
            file = folder / f"{number}.jsonl"
            file.write_text((json.dumps(ROWS[dataset.path]) + "\n") * 30)
            overrides.append(f"datasets.{number}.path={file}")
            overrides += [
                f"datasets.{number}.{key}=null" for key in ("split", "name", "revision", "data_files")
            ]
    return load_recipe(recipe.name, [*overrides, *more], extend=recipe_type)


# CUDA alone has the kernels of bitsandbytes: here the same is computed without them
ON_A_CPU = {"load_in_4bit": "false", "optim": "adamw_torch"}


def on_a_cpu(recipe: Recipe) -> list[str]:
    asked = {"load_in_4bit": recipe.model.load_in_4bit, "optim": "8bit" in recipe.training.optim}
    return [f"{key}={ON_A_CPU[key]}" for key, is_asked in asked.items() if is_asked]


@pytest.mark.slow  # importing trl and peft takes seconds
@pytest.mark.parametrize("name", LIBRARY)
def test_a_shipped_recipe_trains_a_step_on_a_tiny_twin_of_its_model(name: str, tmp_path: Path) -> None:
    """Its data are tokenized and packed, its model is built with its adapters, one step moves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    short = f"max_length={min(1024, LIBRARY[name].data.max_length)}"
    recipe = twin_of(LIBRARY[name], tmp_path, short, *on_a_cpu(LIBRARY[name]))
    if recipe.model.model_name_or_path == str(tmp_path):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    base = prepare_base(recipe, tmp_path / "base")
    tokenizer = load_tokenizer(recipe.model, base.folder)
    check_fit(recipe, base.folder)

    corpus = build_corpus(recipe, tokenizer)
    lease = [corpus.sample(position) for position in range(4)]
    local = build_peer(load_trained(recipe, base.folder), recipe, 2).trainer
    before = local.flat.vector.clone()
    local.zero()
    loss = local.backward([lease], local.objective.terms(lease)).loss_sum
    local.clip(recipe.training.max_grad_norm)
    local.step(1e-3)

    assert loss > 0
    assert not torch.equal(local.flat.vector, before)
    assert any(sample.documents for sample in lease) == (
        recipe.data.isolates_documents or len(recipe.objective.sequences) > 1
    )


@pytest.mark.parametrize(
    "name", [name for name, recipe in LIBRARY.items() if recipe.datasets[0].type == "chat"]
)
def test_of_a_shipped_chat_recipe_the_assistants_words_are_trained(name: str, tmp_path: Path) -> None:
    recipe = twin_of(LIBRARY[name], tmp_path, "packing=false", *on_a_cpu(LIBRARY[name]))
    tokenizer = load_tokenizer(recipe.model, config_folder(recipe.model))

    sample = build_corpus(recipe, tokenizer).sample(0)

    runs = np.split(np.arange(len(sample.tokens)), np.flatnonzero(np.diff(sample.trained)) + 1)
    said = [tokenizer.decode(sample.tokens[run]) for run in runs if sample.trained[run[0]]]
    assert len(said) == 2
    assert "A drink of several things." in said[0]
    assert "Better not." in said[1]
    assert all("cocktail?" not in text for text in said)


@pytest.mark.parametrize("name", LIBRARY)
def test_the_header_says_what_is_needed_what_to_run_first_and_where_the_numbers_come_from(name: str) -> None:
    header = recipe_path(name, recipe_type).read_text(encoding="utf-8").split("\nversion:")[0]
    first, needs = header.split("\n", 1)[0], LIBRARY[name].swarm.requires

    assert "# First" in header
    assert "# From" in header
    if needs is not None and needs.bandwidth_mbps is not None:
        assert f" {needs.bandwidth_mbps:g} Mbit/s," in first
        vram = needs.vram // 10**9
        assert re.search(rf"4 x {vram // 4} GB|{vram} (GB|to \d+ GB)", first)


@pytest.mark.slow  # models of 20 B parameters, without memory
@pytest.mark.parametrize("name", LIBRARY)
def test_the_header_tells_the_parameters_and_the_packet_that_a_plan_of_the_real_model_prints(
    name: str, tmp_path: Path
) -> None:
    recipe, text = LIBRARY[name], recipe_path(name, recipe_type).read_text(encoding="utf-8")
    model = recipe.model.model_name_or_path
    folder = BUILTIN_MODELS.get(model) or tmp_path
    if model in REAL:
        (tmp_path / "config.json").write_text(json.dumps(REAL[model]))
    if recipe.swarm.requires is None:
        trained = layout_of(meta_trained_model(recipe, folder)).size
    else:
        vram = recipe.swarm.requires.vram or 0
        gpus = 4 if vram > 150e9 else 1  # as the header says
        have = int(NOMINAL * vram / gpus)
        plan = plan_memory(recipe, folder, 1, Machine(have, True, gpus))
        assert plan.bytes + RUNTIME <= have
        trained = plan.parameters

    if recipe.lora is not None:
        (told,) = re.findall(r"# ([\d.]+ M) parameters", text)
        assert told == f"{trained / 1e6:.1f} M"
    elif model in REAL:
        assert trained == COUNTS[model]
    assert f"# On the wire  about {megabytes(packet_bytes(recipe, trained))} a step each way" in text
