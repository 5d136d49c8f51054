"""A machine of a replica: what it is without its part, what it refuses, and how the head reads its errors."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import CLASSES
from transformers import AutoModelForCausalLM

from cocktail_cli.assembly import recipe_type
from cocktail_cli.errors import explain
from cocktail_cli.extensions.stages.compute import (
    RingHead,
    StageFailed,
    StageLost,
    StageMachine,
    StageServer,
    check_staged,
    cut_at_layers,
    cut_of,
    parameter_costs,
)
from cocktail_cli.extensions.stages.compute.ring_ends import MOST
from cocktail_cli.extensions.stages.compute.ring_request import (
    Answer,
    error_values,
    raise_error,
    request_of,
    sender,
)
from cocktail_cli.extensions.stages.compute.stage_machine import WeightsReader
from cocktail_cli.extensions.stages.compute.staged_peer import noise_of
from cocktail_cli.extensions.stages.lines import Kind, StageMessage
from compress import PacketError
from recipes.config import Recipe, load_resolved
from recipes.errors import MissingPackage, ModelError
from recipes.models import load_trained, meta_trained_model

WITHOUT = [
    ("fill", {"stage": 2, "name": "a", "start": 0}),
    ("begin", {"name": "ann", "round": 0, "step": 0}),
    ("zero", {}),
    ("encode", {"round": 0, "budget": 1, "alone": False, "flights": []}),
]


class ScriptedLines:
    """Lines to machines that answer each request with these bytes, and say all of `says` first."""

    def __init__(self, answer: bytes = b"", says: Sequence[StageMessage] = ()) -> None:
        self.reply, self.inbox = answer, queue.SimpleQueue[StageMessage]()
        for message in says:
            self.inbox.put(message)
        self.sent, self.refused = list[StageMessage](), list[str]()

    def send(self, message: StageMessage) -> None:
        self.sent.append(message)
        if self.reply and message.kind == "request":
            self.inbox.put(replace(message, body=self.reply))

    def receive(self, timeout: float) -> StageMessage | None:
        try:
            return self.inbox.get(timeout=timeout) if timeout else self.inbox.get_nowait()
        except queue.Empty:
            return None

    def refuse(self, kind: str, why: str) -> None:
        self.refused.append(kind)


def request(answers: Any, data: Any = (b"", b""), do: Any = "held", fields: Any = ()) -> bytes:
    return msgspec.msgpack.encode({"do": do, "fields": dict(fields), "answers": answers, "data": data})


KINDS: tuple[Kind, ...] = ("request", "activations", "gradients", "mismatch")
HELD = {"key": "", "round": 0, "step": -1}
THREE = (range(1), range(1, 2), range(2, 3))  # layers of three machines
FINE = {"places": 32, "shorter": 20.0, "signal": 1.0, "noise": 2.0, "least": 0.5}


@pytest.mark.parametrize(
    ("answer", "stage"),
    [
        (b"no request", 2),
        (b"\x91" * (1 << 20), 2),
        (request([HELD, 5]), 2),
        (request([HELD]), 2),
        (request([HELD, HELD, HELD], (b"", b"", b"")), 2),
        (request([{}, HELD]), 1),
        (request([HELD, HELD | {"step": 1 << 63}]), 2),
        (request([HELD | {"round": True}, HELD]), 1),
        (request([HELD, HELD | {"key": 5}]), 2),
        (request([{"error": ["RuntimeError"], "message": {}}, HELD]), 1),
        (request([HELD, {"error": "not finite"}]), 2),
        (request([], (), "failed"), 2),
        (request([], (), "failed", {"stage": 1, "error": 5}), 1),
        (request([], (), "failed", {"stage": "1", "error": "StageFailed"}), 2),
    ],
)
def test_a_head_whose_machines_answer_with_garbage_names_one_of_them(answer: bytes, stage: int) -> None:
    """No other error, and no waiting: its process goes on, and another machine can have that place."""
    lines = ScriptedLines(answer)
    head = RingHead(StageMachine(0), lines, THREE)
    try:
        with pytest.raises(StageFailed, match=f"stage {stage}: ") as met:
            head.ask("held") if b"failed" not in answer else asked(head)
    finally:
        head.close()
    assert met.value.stage == stage


@pytest.mark.parametrize(
    "told",
    [{}, {"places": 1}, dict.fromkeys(FINE, "1"), FINE | {"shorter": float("nan")}, FINE | {"more": 1}],
)
def test_a_machine_that_tells_no_numbers_of_its_gradients_noise_is_named(told: dict[str, Any]) -> None:
    said = [Answer({"noise": FINE}), Answer({"noise": FINE}), Answer({"noise": told})]
    with pytest.raises(StageFailed, match="stage 2: answers square with noise"):
        noise_of(said)
    assert noise_of(said[:2]).places == 64
    high = [Answer({"noise": FINE}), Answer({"noise": FINE | {"least": 1e-9, "shorter": 0.0}})]
    assert noise_of(high).factor < 1.5, "no machine makes steps longer than the head's share allows"


def asked(head: RingHead) -> None:
    """Send a request, and take what is said of the step under way."""
    head.lines.send(StageMessage(1, "request", 0, b""))
    head.next(wait=True)


def test_a_head_that_is_sent_more_messages_than_a_step_has_ends_the_step() -> None:
    says = [StageMessage(7, "gradients", 0, b"")] * (2 * MOST)
    head = RingHead(StageMachine(0), ScriptedLines(says=says), THREE)
    try:
        with pytest.raises(StageFailed, match="stage 1: sends more messages than a step has"):
            all(iter(partial(head.next, True), None))  # some are there before that is noticed
    finally:
        head.close()


class Stored:
    """A vector of one parameter, all zeros."""

    class layout:
        names, offsets = ("a",), (0, 4)

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.zeros(stop - start, np.float32)


def recipe(*overrides: str) -> Recipe:
    return load_resolved("smoke", ["stages={}", *overrides], extend=recipe_type).recipe


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
    with pytest.raises(ModelError, match="9 machines are more than this model has layers for"):
        cut_of(parameter_costs(meta_trained_model(recipe(), tmp_path)), 9, recipe())


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


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_both_ends_of_a_line_number_each_other_alike(stages: int) -> None:
    for number in range(stages):
        assert sender(sender(number, "gradients", stages), "activations", stages) == number
        assert sender(number, "request", stages) in range(stages)


def test_a_machine_that_is_sent_garbage_tells_its_head_who_sends_it_and_serves_on(tmp_path: Path) -> None:
    """Activations and requests come from the stage before, all else from the one after."""
    base = tmp_path / "base"
    AutoModelForCausalLM.from_config(CLASSES["llama"]()).save_pretrained(base)
    asked = cut_at_layers(recipe(f"model.model_name_or_path={base}"), base)
    told: dict[str, Any] = {"recipe": asked.to_json(), "config": (base / "config.json").read_text()}
    source = {"base": "base", "from_snapshot": False}
    machine = StageMachine(1, base=base)
    machine.answer("load", told | {"layers": {"1": (0, 1)}, "source": source}, b"")
    machine.answer("begin", {"name": "ann", "round": 0, "step": 0}, b"")
    says = [StageMessage(7, kind, 0, b"garbage") for kind in KINDS]
    lines = ScriptedLines(says=[*says, StageMessage(1, "request", 0, request([]))])
    server = StageServer(machine, lines, 3)
    serving = threading.Thread(target=server.run)
    serving.start()
    while len(lines.sent) <= len(KINDS) and serving.is_alive():
        serving.join(0.01)
    server.stop.set()
    serving.join()

    *failed, answered = map(request_of, lines.sent)
    assert [one.fields["stage"] for one in failed] == [1, 1, 2, 2], "the head cannot replace itself"
    assert {one.do for one in failed} == {"failed"}
    assert lines.refused == list(KINDS)
    assert len(answered.answers) == 1


@pytest.mark.parametrize(("answers", "data"), [([], [1]), ([], ["1"]), ([], None), ([{}], []), ([5], [b""])])
def test_a_request_of_other_types_or_with_more_answers_than_stages_is_refused(
    answers: Any, data: Any
) -> None:
    with pytest.raises(PacketError):
        request_of(StageMessage(1, "request", 0, request(answers, data)))


def test_weights_are_given_in_the_formats_of_weights_alone() -> None:
    reader = WeightsReader(Stored(), None)

    assert list(reader.windows("a", "torch.bfloat16")) == [(0, bytes(8))]
    assert reader.has(["a", 4, "torch.bfloat16"])
    for wanted in ("torch.load", "bfloat16", "torch.int8"):
        assert not reader.has(["a", 4, wanted])
    assert not reader.has(["b", 4, "torch.bfloat16"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("model.trust_remote_code=true", "trust_remote_code"),
        ("momentum_masking=true", "momentum_masking: a replica of several machines cannot do that"),
        ("audits={}", "audits: a replica of several machines cannot do that"),
        ("stages=null", "a recipe without `stages:`"),
    ],
)
def test_what_machines_cannot_do_together_is_refused(asked: str, said: str) -> None:
    check_staged(recipe("compression.shards=[4]"))
    with pytest.raises(ModelError, match=said):
        check_staged(recipe("compression.shards=[4]", asked))
