"""Direct preference optimization: TRL's DPOTrainer is the reference, on the same rows and adapters."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import BUILTIN, tiny_config

from cocktail_cli.assembly import recipe_type
from recipes.config import Recipe
from recipes.data import Corpus, Sample, build_corpus
from recipes.models import load_trained
from recipes.objectives import Measured, evaluate, objective_of
from recipes.training import SingleDeviceTrainer

ASK = {"role": "user", "content": "Two and two?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is four.", "Five, I believe."))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
OLD_TRL = tuple(map(int, version("trl").split(".")[:2])) < (1, 16)
LOUD = {"chat_template_kwargs": {"loud": True}}
TEMPLATE = (
    "{% if tools %}{{ 'Tools: ' + (tools | tojson) }}{% endif %}{% if loud %}{{ 'LOUD' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PAIRS: dict[str, list[dict[str, Any]]] = {
    "texts": [
        {"prompt": "The sky is", "chosen": " blue.", "rejected": " green, or so they say."},
        {"prompt": "Two and two is", "chosen": " four, as ever.", "rejected": " five."},
    ],
    "texts with an implicit prompt": [
        {"chosen": "The sky is blue.", "rejected": "The sky is green, or so they say."},
        {"chosen": "It is four, as ever.", "rejected": "It is five."},
    ],
    "messages": [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD], "tools": [TOOL], **LOUD},
        {"prompt": [ASK], "chosen": [BAD], "rejected": [GOOD], "tools": [TOOL], **LOUD},
    ],
    "messages with an implicit prompt": [
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"chosen": [ASK, BAD, ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]},
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(
        tiny_config("llama", 384, bos_token_id=0, eos_token_id=0)
    ).save_pretrained(folder)
    for file in BUILTIN.glob("tokenizer*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


def recipe_of(base: Path, **dpo: Any) -> Recipe:
    return recipe_type(["dpo"]).model_validate(
        {
            "version": 1,
            "name": "test",
            "model": {"model_name_or_path": str(base)},
            "lora": {"lora_r": 4, "lora_dropout": 0.5},
            "dpo": dpo,
            "datasets": [{"path": str(base / "pairs.jsonl")}],
            "training": {"optim": "adamw_torch", "activation_checkpointing": False},
        }
    )


def samples_of(recipe: Recipe, rows: list[dict[str, Any]], tokenizer: Any) -> list[Sample]:
    Path(recipe.datasets[0].path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = build_corpus(recipe, tokenizer)
    assert isinstance(corpus, Corpus)
    return [*corpus.samples]


def moved(model: Any) -> Any:
    """Adapters away from their start, where model and reference are equal."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def of_trl(base: Path, rows: list[dict[str, Any]], tokenizer: Any, out: Path, **dpo: Any) -> Any:
    """Loss, metrics and gradients of TRL's trainer, which reads and tokenizes the rows by itself."""
    from datasets import Dataset as Table
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        str(out), use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=False, **dpo
    )
    trainer: Any = DPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        args=args,
        train_dataset=Table.from_list(rows, on_mixed_types="use_json"),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=4, lora_alpha=32, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    moved(trainer.model).train()
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(len(rows))])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), metrics, grads, batch


@pytest.mark.slow
@pytest.mark.skipif(OLD_TRL, reason="TRL before 1.16 tokenizes some pairs otherwise")
@pytest.mark.parametrize(
    ("kind", "dpo"),
    [
        ("texts", {"beta": 0.1}),
        ("texts with an implicit prompt", {"beta": 0.4}),
        ("messages", {"beta": 0.5, "loss_type": "hinge"}),
        ("messages with an implicit prompt", {"beta": 0.2, "loss_type": "ipo"}),
    ],
)
def test_tokens_loss_rewards_and_gradient_are_those_of_trl(
    kind: str, dpo: dict[str, Any], base: Path, tokenizer: Any, tmp_path: Path
) -> None:
    recipe, rows = recipe_of(base, **dpo), PAIRS[kind]
    tokenizer.chat_template = TEMPLATE
    loss, metrics, grads, batch = of_trl(base, rows, tokenizer, tmp_path, **dpo)

    samples = samples_of(recipe, rows, tokenizer)
    local = SingleDeviceTrainer(moved(load_trained(recipe, base)), recipe)
    local.zero()
    found = local.backward([samples[:1], samples[1:]], local.objective.terms(samples))

    for number, sample in enumerate(samples):
        chosen, rejected = np.split(sample.tokens, [sample.documents[0]])
        for row, tokens in ((number, chosen), (number + len(rows), rejected)):
            assert batch["input_ids"][row, : len(tokens)].tolist() == tokens.tolist()
            assert batch["attention_mask"][row].sum() == len(tokens)
        assert batch["completion_mask"][number :: len(rows)].sum() == sample.count
    assert found.terms == len(rows)
    assert found.mean == pytest.approx(loss, abs=1e-5)
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
    assert [one / found.terms for one in found.figures] == pytest.approx(
        [metrics[n] for n in names], abs=1e-5
    )
    for name, parameter in local.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-3, atol=1e-5)


def test_at_the_start_model_and_reference_are_equal_and_the_reference_never_moves(
    base: Path, tokenizer: Any
) -> None:
    """The loss begins at log 2; after steps the rewards tell the pairs apart, and the base is what it was."""
    recipe = recipe_of(base)
    samples = samples_of(recipe, PAIRS["texts"], tokenizer)
    local = SingleDeviceTrainer(load_trained(recipe, base), recipe)
    frozen = {n: p.clone() for n, p in local.model.named_parameters() if not p.requires_grad}
    before = local.evaluate(local.flat.vector, samples, 1)

    for _ in range(12):
        local.zero()
        local.backward([samples], 2)
        local.step(1e-2)
    after = evaluate(objective_of(recipe), local.model, samples, 2)

    assert before.mean == pytest.approx(np.log(2), abs=1e-6)
    assert before.figures == pytest.approx((0, 0, 0), abs=1e-5)
    assert after.mean < 0.65
    assert after.figures[2] == 2
    assert after.figures[0] > after.figures[1]
    for name, parameter in local.model.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name])


def test_what_does_not_count_adds_nothing_and_the_largest_sample_has_two_sequences(
    base: Path, tokenizer: Any
) -> None:
    recipe = recipe_of(base)
    local = SingleDeviceTrainer(moved(load_trained(recipe, base)), recipe)
    objective, samples = local.objective, samples_of(recipe, PAIRS["texts"], tokenizer)

    idle = objective.uncounted(samples[0])

    assert evaluate(objective, local.model, [idle], 1) == Measured(0.0, 0, (0.0, 0.0, 0.0))
    together = evaluate(objective, local.model, [*samples, idle], 3)
    alone = evaluate(objective, local.model, samples, 1)
    assert together.terms == 2
    assert together.loss_sum == pytest.approx(alone.loss_sum, abs=1e-5)
    assert objective.longest(16).lengths == (16, 16)
    assert objective.terms([objective.longest(16)]) == 1
