"""Recipes: what is accepted, what is refused, and how that is said."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from cocktail_cli.assembly import recipe_type
from recipes.config import (
    PRESETS,
    Dataset,
    Recipe,
    list_recipes,
    load_recipe,
    load_resolved,
    parse_duration,
    recipe_from_json,
)
from recipes.config.document import bare_keys, sections
from recipes.config.loader import (
    GONE_KEYS,
    VALUE_HINTS,
    RecipeError,
    foreign_keys,
    gone_keys,
    published_recipe,
    recipe_path,
)
from recipes.config.presets import CHOSEN
from recipes.errors import Problem

SMALL = """\
version: 1
name: small
model:
  model_name_or_path: ./model
datasets:
  - path: my.jsonl
"""


def problems(path: Path | str, overrides: list[str] | None = None) -> list[Problem]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides or [])
    return caught.value.problems


# ---- the library ---------------------------------------------------------------------------------


def test_every_shipped_recipe_is_valid_and_bears_the_name_of_its_file() -> None:
    names = [recipe.name for recipe in list_recipes(recipe_type)]

    assert "smoke" in names
    assert [recipe_path(name, recipe_type).stem for name in names] == names


def test_every_shipped_recipe_says_in_its_first_line_how_to_run_it() -> None:
    for recipe in list_recipes(recipe_type):
        first = recipe_path(recipe.name, recipe_type).read_text(encoding="utf-8").splitlines()[0]

        assert first.startswith(f"# {recipe.name}.yaml -- ")
        assert first.endswith(f"Run: cocktail launch {recipe.name}")
        assert recipe.description


def test_an_unknown_name_is_reported_with_the_nearest_one() -> None:
    [problem] = problems("smok")

    assert problem.message == "no recipe of this name and no such file"
    assert problem.hint == "did you mean `smoke`?"


@pytest.mark.parametrize(
    ("name", "message"), [("missing.yaml", "no such file"), (".", "is a folder, not a recipe")]
)
def test_a_path_that_is_no_recipe_is_reported(name: str, message: str) -> None:
    assert [p.message for p in problems(name)] == [message]


def test_loading_recipes_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from recipes.config.loader import load_recipe; load_recipe('smoke');"
        "print([m for m in ('torch', 'transformers', 'datasets', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


# ---- names ---------------------------------------------------------------------------------------


def test_leaf_names_are_unique_so_that_a_bare_leaf_names_one_key() -> None:
    names = [leaf for model in sections().values() for leaf in model.model_fields]
    counts = Counter([*names, *Recipe.model_fields])

    assert [name for name, count in counts.items() if count > 1 and name] == []
    whole = recipe_type()
    assert not set(bare_keys(whole)) & (set(foreign_keys(whole)) | set(gone_keys(whole)))
    assert not set(foreign_keys(whole)) & set(Dataset.model_fields)


def test_other_tools_names_lead_to_keys_that_exist() -> None:
    whole = recipe_type()
    known = {".".join(map(str, key)) for key in bare_keys(whole).values()} | set(sections(whole))

    assert set(foreign_keys(whole).values()) <= known


def test_several_mistakes_are_reported_at_once_each_with_its_line(write) -> None:
    found = problems(
        write(
            SMALL
            + "training:\n  learing_rate: 1.0e-4\n  micro_batch_size: 2\n  max_length: 64\n"
            + "max_steps: 5\nfrobnicate: 1\n"
        )
    )

    assert [(p.line, p.key, p.message) for p in found] == [
        (8, "training.learing_rate", "did you mean `learning_rate`?"),
        (9, "training.micro_batch_size", "cocktail calls this training.per_device_train_batch_size"),
        (10, "training.max_length", "it belongs under `data:`"),
        (11, "max_steps", "it belongs under `training:`"),
        (12, "frobnicate", "unknown key"),
    ]


def test_the_error_reads_as_a_list_of_places(write) -> None:
    path = write(SMALL + "training:\n  lr: 1\n  seed: yes\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)

    assert str(caught.value) == (
        f"{path} has 2 problems\n"
        f"  {path}:8  training.lr    cocktail calls this training.learning_rate\n"
        f"  {path}:9  training.seed  must be a whole number, not True"
    )


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("trainning: {}", "trainning", "did you mean `training`?"),
        ("path: x.jsonl", "path", "it belongs under `datasets:`"),
        ("data: {name: x}", "data.name", "it belongs at the top level"),
        ("data: {quant_bit: 4}", "data.quant_bit", "did you mean `compression.quant_bits`?"),
        (
            "data: {train_on_inputs: false}",
            "data.train_on_inputs",
            "cocktail calls this data.completion_only_loss",
        ),
        ("training: {lora_r: 8}", "training.lora_r", "it belongs under `lora:`"),
        ("swarm: {requires: {vrm: 1GB}}", "swarm.requires.vrm", "did you mean `vram`?"),
        ("QUANT_BITS: 4", "QUANT_BITS", "cocktail calls this compression.quant_bits"),
        (
            "training: {gradient_checkpointing: true}",
            "training.gradient_checkpointing",
            "cocktail calls this training.activation_checkpointing",
        ),
    ],
)
def test_a_wrong_name_leads_to_the_right_one(write, text: str, key: str, message: str) -> None:
    assert [(p.line, p.key, p.message) for p in problems(write(SMALL + text + "\n"))] == [(7, key, message)]


# ---- what there is not ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", GONE_KEYS)
def test_a_key_that_there_is_not_is_refused_with_one_line_that_says_what_is_so_instead(
    write, key: str
) -> None:
    [written] = problems(write(SMALL + f"compression: {{{key}: 1}}\n"))
    [typed] = problems(write(SMALL), [f"{key}=1"])

    assert (written.line, written.key, written.message) == (7, f"compression.{key}", GONE_KEYS[key])
    assert typed.message == GONE_KEYS[key]
    assert "\n" not in GONE_KEYS[key]


def test_an_open_run_is_one_whose_url_is_published(write) -> None:
    [problem] = problems(write(SMALL + "swarm: {join: open}\n"))

    assert (problem.line, problem.key) == (7, "swarm.join")
    assert (problem.message, problem.hint) == (
        "must be 'token' or 'approve', not 'open'",
        VALUE_HINTS["swarm.join", "open"],
    )


def test_keys_that_are_gone_are_left_out_of_the_recipe_of_a_run_of_before() -> None:
    recipe = load_recipe("smoke")
    values = json.loads(recipe.to_json()) | {"gone": {"a": 1}}
    values["swarm"]["gone"] = 0.0
    values["datasets"][0]["gone"] = True
    values["compression"]["local_steps"] = "auto"

    with pytest.raises(RecipeError):
        recipe_from_json(json.dumps(values))
    assert recipe_from_json(json.dumps(values), former=True) == recipe


def test_a_default_that_is_written_changes_nothing(write) -> None:
    plain = load_recipe(write(SMALL))
    spelt = load_recipe(
        write(
            SMALL
            + "lora: null\ntraining: {bf16: auto, fp32_master_weights: true}\nlogging: {logging_steps: 1}\n"
        )
    )

    assert spelt.recipe_hash == plain.recipe_hash


def test_zero_is_not_false_for_a_switch(write) -> None:
    assert [p.key for p in problems(write(SMALL + "training: {bf16: 0}\n"))] == ["training.bf16"]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {max_length: true}", "must be a whole number, not True"),
        ("data: {max_length: 7}", "must be at least 8, not 7"),
        ("data: {max_length: 64.5}", "must be a whole number, not 64.5"),
        ("training: {learning_rate: on}", "must be a number, not True"),
        ("training: {learning_rate: fast}", "must be a number, not 'fast'"),
        ("training: {learning_rate: .nan}", "must be a finite number, not nan"),
        ("training: {learning_rate: 1}", "must be below 1, not 1"),
        ("training: {warmup_steps: 2.5}", "2.5 is neither a whole number nor a share below 1"),
        ("training: {max_steps: 0}", "must be at least 1, or -1 for whole epochs, not 0"),
        ("compression: {state_device: gpu}", "must be 'auto', 'accelerator' or 'cpu', not 'gpu'"),
        ("compression: {quant_bits: 5}", "must be 1, 2, 3, 4, 8, 16 or 32, not 5"),
        ("compression: {random_ratio: 0}", "must be above 0, not 0"),
        ("swarm: {step_timeout: soon}", "'soon' is not a duration; write 45s, 10m or 2h"),
        ("swarm: {requires: {vram: 24 stones}}", "'24 stones' is not a size; write 24GiB or 80GB"),
        ("data: 3", "must be a section, a mapping of keys to values, not 3"),
        ("description: no", "must be text, not False"),
        ("eval_datasets: [{}]", "is required"),
    ],
)
def test_a_wrong_value_is_reported_beside_what_was_met(write, text: str, message: str) -> None:
    assert [(p.line, p.message) for p in problems(write(SMALL + text + "\n"))] == [(7, message)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 2", "must be 1, not 2"),
        ("name: My Run", "must be lower-case letters, digits, dots and dashes, at most 64, not 'My Run'"),
        ("datasets: []", "needs at least one entry"),
        ("datasets: my.jsonl", "must be a list, not 'my.jsonl'"),
        ("model: {}", "is required"),
    ],
)
def test_a_wrong_start_is_reported(write, text: str, message: str) -> None:
    kept = [
        block
        for block in ("version: 1", "name: small", "model: {model_name_or_path: m}", "datasets: [{path: p}]")
        if block.split(":")[0] != text.split(":")[0]
    ]

    assert [p.message for p in problems(write("\n".join([*kept, text]) + "\n"))] == [message]


def test_an_exponent_without_a_point_is_a_number_though_pyyaml_reads_text(write) -> None:
    recipe = load_recipe(write(SMALL + "training: {learning_rate: 1e-5, adam_epsilon: 1E-9}\n"))

    assert recipe.training.learning_rate == 1e-5
    assert recipe.training.adam_epsilon == 1e-9


@pytest.mark.parametrize(
    ("text", "seconds"), [("45s", 45), ("10m", 600), ("1.5h", 5400), ("250ms", 0.25), (30, 30)]
)
def test_durations_are_seconds(text: str | int, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("training: {global_batch_size: 2}\nswarm: {min_peers: 4}", "training.global_batch_size"),
        ("swarm: {min_peers: 4, max_peers: 2}", "swarm.max_peers"),
        ("data: {streaming: true}", "training.max_steps"),
        ("data: {streaming: true, val_set_size: 0.1}\ntraining: {max_steps: 9}", "data.val_set_size"),
        ("data: {streaming: true, dataset_num_proc: 2}\ntraining: {max_steps: 9}", "data.dataset_num_proc"),
        ("eval_datasets: [{path: x.jsonl, weight: 2}]", "eval_datasets.0.weight"),
        ("data: {val_set_size: 1}\neval_datasets: [{path: x.jsonl}]", "data.val_set_size"),
        ("checkpoint: {eval_steps: 10}", "checkpoint.eval_steps"),
        (
            "training: {lr_scheduler_type: linear, lr_scheduler_kwargs: {min_lr: 0.1}}",
            "training.lr_scheduler_kwargs",
        ),
        ("training: {lr_scheduler_type: cosine_with_min_lr}", "training.lr_scheduler_kwargs"),
        ("compression: {preset: lora-cocktail}", "compression.preset"),
        ("compression: {preset: dgc}\ntraining: {optim: muon}", "compression.momentum_masking"),
        ("training: {max_steps: 99}\ncompression: {preset: diloco}", "compression.local_steps"),
        ("compression: {topk_chunk: 64, topk_ratio: 0.005}", "compression.topk_chunk"),
        ("lora: {}\ntraining: {fp32_master_weights: false}", "training.fp32_master_weights"),
        ("training: {fp32_master_weights: false}", "training.fp32_master_weights"),
        ("training: {bf16: true, fp16: true}", "training.fp16"),
    ],
)
def test_keys_that_contradict_each_other_are_reported(write, text: str, key: str) -> None:
    assert [p.key for p in problems(write(SMALL + text + "\n"))] == [key]


def test_a_run_chooses_what_neither_the_recipe_nor_its_preset_writes(write) -> None:
    def found(text: str) -> tuple[set[str], list[int], int]:
        recipe = load_recipe(write(SMALL + text + "\n"))
        assert recipe_from_json(recipe.to_json()) == recipe, "who reads it from the hub has the same"
        published = load_recipe(write(yaml.safe_dump(published_recipe(recipe))))
        assert published.compression == recipe.compression
        one = recipe.compression
        return set(one.auto), [rung.local_steps for rung in one.rungs], one.first_rung

    own = {"topk_ratio", "quant_bits"}
    steps = [1, 2, 4, 8]

    assert found("") == (set(CHOSEN), [1, 1, *steps], 1)
    assert found("compression: {auto: true}") == found("")
    assert found("compression: {auto: false}") == (set(), [1], 0)
    assert found("compression: {topk_ratio: 0.2}") == ({*CHOSEN} - {"topk_ratio"}, steps, 0)
    assert found("compression: {local_steps: 3}") == ({*CHOSEN} - {"local_steps"}, [3], 0)
    assert found("compression: {auto: [topk_ratio], topk_ratio: 0.1}") == ({"topk_ratio"}, [1], 0)
    assert found("lora: {}") == (own | {"local_steps"}, steps, 0)
    assert found("compression: {preset: cocktail-paper}") == (own, [1], 0)
    assert found("compression: {preset: cocktail-thin, quant_bits: 3}") == ({"topk_ratio"}, [1], 0)
    for once in ("staleness: 0", "error_decay: 0.9", "uncompressed_steps: 9", "outer_momentum: 0.5"):
        assert found(f"compression: {{{once}}}")[1] == [1], "what acts once a round has rounds of one length"


def test_local_steps_are_a_number(write) -> None:
    for wrong in ("0", "fast", "1.5", "true", "auto"):
        (problem,) = problems(write(SMALL + f"compression: {{local_steps: {wrong}}}\n"))
        assert problem.key == "compression.local_steps"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["load_in_4bit=true"], "model.load_in_4bit"),
        (["load_in_8bit=true", "load_in_4bit=true", "lora_r=8"], "model.load_in_8bit"),
        (["dtype=float16"], "model.dtype"),
        (["dtype=bfloat16", "fp16=true"], "training.fp16"),
        (["save_steps=0.0"], "checkpoint.save_steps"),
        (["lora_dropout=1"], "lora.lora_dropout"),
        (["activation_checkpointing_kwargs={every_n_layers: 0}"], "training.activation_checkpointing_kwargs"),
        (["activation_checkpointing_kwargs={layers: 1}"], "training.activation_checkpointing_kwargs"),
    ],
)
def test_a_way_of_training_that_cannot_be_is_reported(write, overrides: list[str], key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(SMALL), overrides)

    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_lora_section_may_be_empty_and_names_may_be_listed(write) -> None:
    lora = load_recipe(write(SMALL + "lora: {}\n")).lora
    named = load_recipe(write(SMALL), ["lora_target_modules=[q_proj, v_proj]"]).lora

    assert (lora.lora_r, lora.lora_target_modules) == (16, "all-linear")
    assert named.lora_target_modules == ("q_proj", "v_proj")
    assert load_recipe(write(SMALL)).lora is None


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["datasets.0.weight=1", "datasets.1.path=x"], "datasets.1.weight"),
        (["streaming=true", "max_steps=9", "datasets.1.path=x"], "datasets.0.weight"),
        (["streaming=true", "max_steps=9", "datasets.0.split='train[:9]'"], "datasets.0.split"),
    ],
)
def test_what_data_sets_ask_of_each_other_is_reported(write, overrides: list[str], key: str) -> None:
    assert [p.key for p in problems(write(SMALL), overrides)] == [key]


def test_a_preset_stands_in_for_the_keys_that_are_not_written_and_for_no_others(write) -> None:
    resolved = load_resolved(
        write(SMALL + "compression: {preset: diloco, quant_bits: 4}\n"), ["outer_momentum=0"]
    )
    compression, origin = resolved.recipe.compression, resolved.document.origin

    assert (compression.local_steps, compression.outer_learning_rate) == (500, 0.7)
    assert (compression.quant_bits, compression.outer_momentum) == (4, 0)
    assert origin(("compression", "local_steps")) == "preset diloco"
    assert origin(("compression", "quant_bits")).endswith("my.yaml:7")
    assert origin(("compression", "outer_momentum")) == "outer_momentum=0"
    assert origin(("compression", "error_decay")) is None


def test_each_preset_is_a_recipe_that_peers_read_as_it_was_resolved(write) -> None:
    """No preset says what a recipe could not."""
    for name, preset in PRESETS.items():
        recipe = load_recipe(write(SMALL + f"lora: {{}}\ncompression: {{preset: {name}}}\n"))
        said = recipe.compression.model_dump()

        assert {key: said[key] for key in preset.keys} == preset.keys
        assert recipe_from_json(recipe.to_json()) == recipe


def test_a_recipe_cannot_be_changed_after_it_was_checked() -> None:
    recipe = load_recipe("smoke")

    with pytest.raises(ValueError, match="frozen"):
        recipe.training.learning_rate = 1.0  # type: ignore[misc]


# ---- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file is empty"),
        ("- a\n- b\n", 1, "a recipe is a mapping of keys to values"),
        (SMALL + "data: {max_length: 64\n", 8, "not valid YAML: expected ',' or '}', but got '<stream end>'"),
        (SMALL + "name: again\n", 7, "written twice, first in line 2"),
        ("a: &x 1\nb: *x\n", 2, "YAML aliases (`*name`) have no place in a recipe"),
        (SMALL.encode() + b"description: \xff\n", None, "not UTF-8 text: invalid start byte"),
        (SMALL + "x: !!python/object:os.system {}\n", 7, None),
        ("[" * 4000, 1, "nested deeper than any recipe"),
        (SMALL + "description: 2026-13-40\n", None, "not valid YAML: month must be in 1..12"),
    ],
)
def test_text_that_is_no_recipe_is_reported(
    write, text: str | bytes, line: int | None, message: str | None
) -> None:
    [problem] = problems(write(text))

    assert problem.line == line
    assert message is None or problem.message == message


def test_a_byte_order_mark_is_no_problem(write) -> None:
    assert load_recipe(write(b"\xef\xbb\xbf" + SMALL.encode())).name == "small"
