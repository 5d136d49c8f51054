"""A machine of a replica: what it is without its part, what it refuses, and how the head reads its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CLASSES
from transformers import AutoModelForCausalLM

from cocktail_cli.errors import explain
from compress import PacketError
from recipes.config.loader import load_recipe
from recipes.config.schema import Recipe
from recipes.errors import MissingPackage, ModelError, StageFailed, StageLost
from recipes.models import load_trained
from recipes.pipeline import StageMessage
from recipes.staged_peer import RingHead, StageMachine, check_staged, load_replica
from recipes.staged_peer.ring_request import HEAD, error_values, raise_error, request_of
from recipes.staged_peer.weights_reader import WeightsReader

WITHOUT = [
    ("fill", {"stage": 2, "name": "a", "start": 0}),
    ("begin", {"name": "ann", "round": 0, "step": 0}),
    ("zero", {}),
    ("encode", {"round": 0, "budget": 1, "alone": False, "flights": []}),
]


class NoLines:
    """Lines to machines that never say anything."""

    def send(self, message: StageMessage) -> None:
        """Lose a message."""

    def receive(self, timeout: float) -> None:
        return None


class Stored:
    """A vector of one parameter, all zeros."""

    class layout:
        names, offsets = ("a",), (0, 4)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, np.float32)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("smoke", ["compression.shards_at_layers=true", *overrides])


@pytest.mark.parametrize(("do", "fields"), WITHOUT)
def test_a_machine_that_was_started_again_is_a_lost_one_whatever_it_is_asked(
    do: str, fields: dict[str, Any]
) -> None:
    """So the session ends and the head joins anew, rather than its process."""
    with pytest.raises(StageLost) as met:
        StageMachine(2).answer(do, fields, b"")

    with pytest.raises(StageLost, match="stage 2: it was started again, and has nothing to train"):
        raise_error(2, error_values(met.value, full=False))


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ModelError("no"), ModelError, 3),
        (MissingPackage("no", "x"), ModelError, 3),
        (RuntimeError("no"), StageFailed, 75),
    ],
)
def test_a_model_that_a_stage_cannot_use_is_no_temporary_error(
    error: Exception, kind: type[Exception], status: int
) -> None:
    with pytest.raises(kind, match="stage 1: no") as met:
        raise_error(1, error_values(error, full=False))
    assert explain(met.value).exit == status


def test_a_model_of_too_few_layers_is_no_temporary_error(tmp_path: Path) -> None:
    config = CLASSES["llama"]()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    head = RingHead(StageMachine(0), NoLines(), stages=9)
    try:
        with pytest.raises(ModelError, match="9 machines are more than this model has layers for"):
            load_replica(head, recipe(), tmp_path)
    finally:
        head.close()


@pytest.mark.parametrize("lora", [(), ("lora.lora_r=4",)])
def test_a_machine_reads_from_its_own_disk_what_is_not_of_a_snapshot(
    tmp_path: Path, lora: tuple[str, ...]
) -> None:
    """The line carries none of its values; of a frozen base none even where x' is of a snapshot. A machine
    with another base is given them."""
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(CLASSES["llama"]()).save_pretrained(base)
    asked = recipe(f"model.model_name_or_path={base}", *lora)
    told: dict[str, Any] = {"recipe": asked.to_json(), "config": (base / "config.json").read_text()}
    told["layers"] = {"1": (0, 1)}

    def wanted(base_name: str, *, from_snapshot: bool) -> dict[str, int]:
        source = {"base": base_name, "from_snapshot": from_snapshot}
        answer = machine.answer("load", told | {"source": source}, b"")
        return {name: size for name, size, _ in answer.values["parameters"]}

    machine = StageMachine(1, base=base)
    assert wanted("base", from_snapshot=False) == {}
    whole = dict(load_trained(asked, base).named_parameters())
    flat = machine.loading.flat
    assert all(torch.equal(values, whole[name].detach().view(-1)) for name, values in flat.items())
    every = wanted("another", from_snapshot=False)
    assert every.keys() == flat.keys()
    trained = set(machine.loading.whole.names)
    assert wanted("base", from_snapshot=True).keys() == every.keys() & trained
    assert bool(lora) == (every.keys() - trained != set())


@pytest.mark.parametrize("sizes", [[-1, 1], [True], ["1"], [0.0], None])
def test_a_request_whose_sizes_are_no_counts_is_refused(sizes: Any) -> None:
    text = json.dumps({"do": "zero", "fields": {}, "answers": [], "sizes": sizes}).encode()

    with pytest.raises(PacketError):
        request_of(StageMessage(1, "request", 0, HEAD.pack(len(text)) + text))


def test_weights_are_given_in_the_formats_of_weights_alone() -> None:
    reader = WeightsReader(Stored(), None)

    assert list(reader.windows("a", "torch.bfloat16")) == [(0, bytes(8))]
    for wanted in ("torch.load", "bfloat16", "torch.int8"):
        with pytest.raises(ValueError, match="a stage wants a in"):
            list(reader.windows("a", wanted))


def test_a_model_with_code_of_its_own_is_refused() -> None:
    check_staged(recipe("compression.shard_ends=[4]"))
    with pytest.raises(ModelError, match="trust_remote_code"):
        check_staged(recipe("compression.shard_ends=[4]", "model.trust_remote_code=true"))
