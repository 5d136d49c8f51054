"""`CocktailCallback`: transformers' Trainer and TRL's take part in a run; each test is an example."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Swarm, rows, save_tiny
from in_process import recipe_of as recipe_of_texts
from own_host import EXACT, flat, hosted
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from cocktail_cli import CocktailCallback
from cocktail_cli.errors import Failure
from recipes.data import Corpus, Sample, collate

pytestmark = pytest.mark.slow
TRAINING = {"global_batch_size": 4, "max_steps": 3, "learning_rate": 1e-3}
PLAIN: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("gpt_neox", tmp_path_factory.mktemp("neox"))


class InOrder(Dataset[Sample]):
    """The samples of a run of ours, in the order in which its hub leases them."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return len(self.corpus)

    def __getitem__(self, position: int) -> Sample:
        return self.corpus.sample(position)


@pytest.mark.parametrize("names", [("ann",), ("ann", "bob")], ids=["one peer", "two peers"])
def test_sft_by_a_trainer_is_sft_by_our_loop(neox: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """The same samples and optimizer: of one peer, which has them in the same order too, the same x' within
    rounding; of two the same loss of x', within noise."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows(78)))
    ours = {"max_grad_norm": 0.5, "max_steps": 12, "warmup_steps": 2, "lr_scheduler_type": "cosine"}
    recipe = recipe_of_texts(
        neox,
        tmp_path / "rows.jsonl",
        training=ours,
        compression=EXACT,
        checkpoint={"eval_steps": None},
    )
    with Swarm(recipe, tmp_path / "texts", first_peers=len(names)) as swarm:
        swarm.start(*names)
        swarm.finish()
        expected, t = swarm.folded(), swarm.recipe.training
        model = swarm.model()
        corpus = swarm.corpus
    assert isinstance(corpus, Corpus)
    before, found = flat(model), dict[str, nn.Module]()

    def peer(name: str) -> None:
        arguments = TrainingArguments(
            str(tmp_path / name),
            per_device_train_batch_size=6 // len(names),
            optim="adamw_torch",
            adam_beta1=t.adam_beta1,
            adam_beta2=t.adam_beta2,
            adam_epsilon=t.adam_epsilon,
            remove_unused_columns=False,
            train_sampling_strategy="sequential" if len(names) == 1 else "random",
            **PLAIN,
        )
        join = CocktailCallback(str(run.url), name=name)
        Trainer(found[name], arguments, collate, InOrder(corpus), callbacks=[join]).train()

    shared = {"global_batch_size": 6, "learning_rate": t.learning_rate} | ours
    with hosted(
        tmp_path / "own", model, {"first_peers": len(names)}, training=shared, compression=EXACT
    ) as run:
        found |= {name: AutoModelForCausalLM.from_pretrained(neox) for name in names}
        threads = [threading.Thread(target=peer, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        run.wait()

        assert torch.equal(flat(found["ann"]), run.folded())
        assert {row.peer for row in run.ledger.counted()} == {*names}
    losses = [loss_of(model, vector, corpus) for vector in (before, expected, flat(found["ann"]))]
    moved = (expected - before).norm()
    assert moved > 0.01
    assert losses[1] < 0.95 * losses[0]
    assert abs(losses[2] - losses[1]) < 0.2 * (losses[0] - losses[1])
    if len(names) == 1:
        assert (flat(found["ann"]) - expected).norm() < 1e-3 * moved


def loss_of(model: nn.Module, vector: torch.Tensor, corpus: Corpus) -> float:
    """The loss on the held-out samples of a model with these parameters."""
    nn.utils.vector_to_parameters(vector, model.parameters())
    with torch.no_grad():
        return float(model(**collate(list(corpus.held_out))).loss)


def test_grpo_with_a_reward_function_in_two_peers_each_with_its_own_rollouts(
    neox: Path, tmp_path: Path
) -> None:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    prompts = datasets.Dataset.from_list([{"prompt": text[:12]} for text in rows(16)])

    def shortest_words(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count(" ")) for text in completions]

    def peer(name: str) -> None:
        arguments = GRPOConfig(
            str(tmp_path / name),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=6,
            logging_steps=1,
            **PLAIN,
        )
        GRPOTrainer(
            own[name],
            shortest_words,
            arguments,
            train_dataset=prompts,
            callbacks=[CocktailCallback(str(run.url), name=name)],
        ).train()

    # one after the other: while transformers loads a model, it ties no weights in any thread
    model, *loaded = (AutoModelForCausalLM.from_pretrained(neox) for _ in range(3))
    own = dict(zip(("ann", "bob"), loaded, strict=True))
    with hosted(
        tmp_path / "run", model, {"min_peers": 2}, training=TRAINING | {"global_batch_size": 8}
    ) as run:
        bob = threading.Thread(target=peer, args=("bob",))
        bob.start()
        peer("ann")
        bob.join(120)
        run.wait()

        assert not torch.equal(run.folded(), flat(model))
        assert {row.peer for row in run.ledger.counted()} == {"ann", "bob"}


def test_a_reward_model(neox: Path, tmp_path: Path) -> None:
    """The head is drawn at random: all peers take it from the run."""
    import datasets
    from trl import RewardConfig, RewardTrainer

    pairs = [{"chosen": text + " good", "rejected": text + " bad"} for text in rows(16)]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(neox)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForSequenceClassification(config)
    with hosted(tmp_path / "run", model, training=TRAINING) as run:
        other = LlamaForSequenceClassification(config)
        RewardTrainer(
            other,
            RewardConfig(str(tmp_path / "out"), per_device_train_batch_size=4, max_length=64, **PLAIN),
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=tokenizer,
            callbacks=[CocktailCallback(str(run.url))],
        ).train()
        run.wait()

        assert torch.equal(flat(other), run.folded())
        assert not torch.equal(flat(other), flat(model))


def test_kto(neox: Path, tmp_path: Path) -> None:
    import datasets
    from trl import KTOConfig, KTOTrainer

    data = [{"prompt": t[:9], "completion": t[9:], "label": bool(i % 2)} for i, t in enumerate(rows(16))]
    model = AutoModelForCausalLM.from_pretrained(neox)
    with hosted(tmp_path / "run", model, training=TRAINING) as run:
        other = AutoModelForCausalLM.from_pretrained(neox)
        KTOTrainer(
            other,
            args=KTOConfig(str(tmp_path / "out"), per_device_train_batch_size=4, max_length=32, **PLAIN),
            train_dataset=datasets.Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(neox),
            callbacks=[CocktailCallback(str(run.url))],
        ).train()
        run.wait()

        assert torch.equal(flat(other), run.folded())
        assert not torch.equal(flat(other), flat(model))


@pytest.mark.parametrize("key", ["auto_find_batch_size", "resume_from_checkpoint"])
def test_an_argument_that_would_make_peers_disagree_is_refused_by_name(
    neox: Path, tmp_path: Path, key: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(neox)
    arguments = TrainingArguments(str(tmp_path / "out"), **PLAIN)
    setattr(arguments, key, True)
    with (
        hosted(tmp_path / "run", model, training=TRAINING) as run,
        pytest.raises(Failure, match=f"{key} is excluded by a swarm"),
    ):
        Trainer(model, arguments, callbacks=[CocktailCallback(str(run.url))])
