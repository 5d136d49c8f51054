"""Kinds of numbers: masters behind a model in bfloat16, autocast, loss scales; and half the micro-batch."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_loop import FakeHub, OneRound
from test_loop import peer_for as bigram_for
from test_loop import recipe as bigram_recipe
from tiny_models import CONFIGS

from recipes.config import Recipe, load_recipe
from recipes.data import Sample, batches
from recipes.errors import MissingPackage, ModelError
from recipes.hardware import HostMemory
from recipes.models import available_attention, check_trainable, load_trained
from recipes.training import (
    FlatParameters,
    LossScale,
    Lowered,
    Peer,
    SingleDeviceTrainer,
    StepDone,
    build_peer,
    finetune,
    micro_batch_for,
    packed,
    peer_checkpoint,
)
from recipes.training.micro_batch import MemoryFull, guessed, tried
from recipes.training.optimizers import EIGHT_BIT, eight_bit
from recipes.training.trainer import rounded, unpacked

ROWS = [
    Sample(np.arange(first, first + length, dtype=np.int32), np.arange(length) > 0)
    for first, length in ((3, 12), (40, 9), (90, 12), (7, 5))
]
TOKENS = sum(sample.count for sample in ROWS)


def recipe_of(base: Path, **sections: Any) -> Recipe:
    training = {"optim": "adamw_torch", "activation_checkpointing": False, "learning_rate": 1e-3}
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "test",
            "datasets": [{"path": "none"}],
            **sections,
            "model": {"model_name_or_path": str(base), **sections.get("model", {})},
            "training": {**training, **sections.get("training", {})},
        }
    )


def alone(base: Path, **sections: Any) -> SingleDeviceTrainer:
    recipe = recipe_of(base, **sections)
    return SingleDeviceTrainer(load_trained(recipe, base), recipe)


def stepped(local: SingleDeviceTrainer, steps: int, micro_batch: int = 2) -> list[float]:
    """The mean loss at each step."""
    losses = []
    for _ in range(steps):
        norm = None
        while norm is None:
            local.zero()
            total = sum(local.backward([part], TOKENS).loss_sum for part in batches(ROWS, micro_batch))
            norm = local.clip(1.0)
        local.step(1e-3)
        losses.append(total / TOKENS)
    return losses


def test_bfloat16_with_masters_learns_what_float32_learns(base) -> None:
    whole, half = alone(base), alone(base, model={"dtype": "bfloat16"})
    plain = alone(base)
    plain.model.to(torch.bfloat16)

    losses, in_half = stepped(whole, 20), stepped(half, 20)

    assert losses[-1] < losses[0] - 1
    np.testing.assert_allclose(in_half, losses, rtol=0.02)
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    moved = (whole.flat.vector - half.flat.vector).norm() / whole.flat.vector.norm()
    assert moved < 0.02


def test_masters_keep_steps_that_bfloat16_would_round_away(base) -> None:
    local = alone(base, model={"dtype": "bfloat16"})
    before = local.flat.vector.clone()
    local.flat.grad.fill_(1.0)

    local.step(1e-6)
    local.flat.refresh()

    assert (local.flat.vector != before).all()
    assert local.flat.copy is not None
    # a copy moves when there is enough
    assert (local.flat.copy == before.to(torch.bfloat16)).float().mean() > 0.9


def test_a_step_in_parts_is_the_step_of_all_parameters_at_once(base, monkeypatch) -> None:
    locals = [alone(base, model={"dtype": "bfloat16"}) for _ in range(2)]
    stepped(locals[0], 3)
    monkeypatch.setattr("recipes.training.trainer.GRADIENT_CHUNK", 1)
    stepped(locals[1], 3)

    assert torch.equal(locals[0].flat.vector, locals[1].flat.vector)


def test_evaluating_another_vector_leaves_a_model_in_bfloat16_as_it_was(base) -> None:
    local = alone(base, model={"dtype": "bfloat16"})
    own = local.evaluate(local.flat.vector, ROWS, 2)

    uniform = local.evaluate(torch.zeros(local.layout.size), ROWS, 2)

    assert uniform.mean == pytest.approx(np.log(320), rel=1e-3)
    assert local.evaluate(local.flat.vector, ROWS, 2) == own
    assert stepped(local, 1) == pytest.approx([own.mean], rel=1e-2)


@pytest.mark.parametrize("asked", [{"bf16": True}, {"fp16": True}])
def test_autocast_computes_in_half_precision_and_trains_float32(base, asked: dict[str, bool]) -> None:
    local = alone(base, training=asked)
    seen = set[torch.dtype]()
    local.model.model.layers[0].mlp.register_forward_hook(lambda *of: seen.add(of[2].dtype))

    losses = stepped(local, 10)

    assert seen == {torch.bfloat16 if "bf16" in asked else torch.float16}
    assert {p.dtype for p in local.model.parameters()} == {torch.float32}
    np.testing.assert_allclose(losses, stepped(alone(base), 10), rtol=0.02)


def test_a_loss_scale_is_halved_until_the_gradient_is_one_and_grows_again(monkeypatch) -> None:
    monkeypatch.setattr("recipes.training.trainer.GROWS", 3)
    scale = LossScale(8.0)

    assert not scale.held(float("inf"))
    assert not scale.held(float("nan"))
    assert scale.value == 2.0
    assert [scale.held(1.0) for _ in range(3)] == [True] * 3
    assert scale.value == 4.0
    assert LossScale().held(float("nan")), "without a scale it is the model that has diverged"


def test_a_gradient_that_float16_does_not_hold_is_computed_again(base) -> None:
    local = alone(base, training={"fp16": True})
    local.scale.value = 2.0**40

    losses = stepped(local, 1)

    assert local.scale.value < 2.0**30
    assert losses[0] == pytest.approx(stepped(alone(base), 1)[0], rel=0.01)


@pytest.mark.parametrize("asked", [{}, {"every_n_layers": 2}, {"offload": True}])
def test_checkpointed_activations_give_the_same_gradients(base, asked: dict[str, Any]) -> None:
    plain = alone(base)
    twice = alone(base, training={"activation_checkpointing": True, "activation_checkpointing_kwargs": asked})
    calls = [0]
    layer = twice.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    for local in (plain, twice):
        local.zero()
        local.backward([ROWS], TOKENS)

    assert calls[0] == 2, "forward, and once more on the way back"
    assert torch.equal(plain.flat.grad, twice.flat.grad)


def test_adapters_in_a_checkpointed_model_get_the_same_gradients(base) -> None:
    lora = {"lora_r": 4, "lora_dropout": 0.0}
    found = []
    for asked in (True, False):
        local = alone(base, lora=lora, training={"activation_checkpointing": asked})
        local.zero()
        local.backward([ROWS], TOKENS)
        found.append(local.flat.grad)

    assert found[0].abs().sum() > 0
    assert torch.equal(found[0], found[1])


# ---- memory --------------------------------------------------------------------------------------


def run_out(peer: Peer, above: int) -> None:
    """A machine whose memory holds `above` sequences."""
    local: Any = peer.trainer
    whole = local.model.forward

    def forward(input_ids: torch.Tensor, **more: Any) -> Any:
        if len(input_ids) > above:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
            )
        return whole(input_ids=input_ids, **more)

    local.model.forward = forward


def test_memory_that_runs_out_halves_the_micro_batch_and_the_step_is_the_same() -> None:
    found = []
    for above in (1, 4):
        hub = FakeHub(bigram_recipe(), [OneRound(t, t) for t in range(3)])
        peer = bigram_for(hub, micro_batch=4)
        run_out(peer, above)
        found.append((list(finetune(hub, peer, now=0)), peer))
    (events, peer), (_, other) = found

    assert [event.micro_batch for event in events if isinstance(event, Lowered)] == [2, 1]
    assert sum(isinstance(event, StepDone) for event in events) == 3
    assert peer.micro_batch == 1
    torch.testing.assert_close(peer.worker.x, other.worker.x)


def test_where_not_one_sequence_fits_three_ways_out_are_told() -> None:
    hub = FakeHub(bigram_recipe(), [OneRound(0, 0)])
    peer = bigram_for(hub, micro_batch=4)
    run_out(peer, 0)

    with pytest.raises(MemoryFull, match="one sequence at a time") as caught:
        list(finetune(hub, peer, now=0))

    assert len(caught.value.hints) == 3
    assert "max_length" in " ".join(caught.value.hints)


def test_an_error_that_is_no_lack_of_memory_is_passed_on() -> None:
    hub = FakeHub(bigram_recipe(), [OneRound(0, 0)])
    peer = bigram_for(hub)
    peer.trainer.model.forward = lambda **_: 1 / 0  # type: ignore[attr-defined]

    with pytest.raises(ZeroDivisionError):
        list(finetune(hub, peer, now=0))


def test_the_vector_of_a_flat_model_in_bfloat16_is_exact(base) -> None:
    recipe = recipe_of(base)
    whole = FlatParameters(load_trained(recipe, base)).vector
    half = FlatParameters(load_trained(recipe, base), torch.bfloat16)

    assert torch.equal(half.vector, whole)
    assert torch.equal(half.copy, whole.to(torch.bfloat16))  # type: ignore[arg-type]


# ---- without masters -----------------------------------------------------------------------------

NO_MASTERS = {"model": {"dtype": "bfloat16"}, "training": {"fp32_master_weights": False}}


def test_rounding_at_random_has_the_right_mean_and_leaves_what_bfloat16_holds() -> None:
    noise = torch.Generator().manual_seed(0)
    x = torch.tensor([1.0 + 2**-10, -3.0 - 2**-9, 1e-30, 0.0, -2.5])

    drawn = torch.stack([rounded(x, noise).double() for _ in range(4000)])

    torch.testing.assert_close(drawn.mean(0), x.double(), rtol=3e-4, atol=0)
    assert {len(set(column.tolist())) for column in drawn.T[:3]} == {2}, "one of two neighbours"
    assert torch.equal(drawn[:, 3:], x[3:].double().expand(4000, 2))


def test_without_masters_a_model_learns_what_float32_learns_and_sends_its_steps(base) -> None:
    whole, recipe = alone(base), recipe_of(base, **NO_MASTERS)
    peer = build_peer(load_trained(recipe, base), recipe, 2)
    local: Any = peer.trainer
    assert peer.worker.residual_norm() == 0, "nothing to send before there is a step"

    losses = stepped(whole, 20)

    np.testing.assert_allclose(stepped(local, 20), losses, rtol=0.03)
    step = peer.worker.residual_norm()
    moved = float(torch.dist(whole.flat.vector, peer.worker.global_model.vector))
    assert step == pytest.approx(moved, rel=0.1), "what rounding adds is small beside what was learnt"
    assert {p.dtype for p in local.model.parameters()} == {torch.bfloat16}


def test_without_masters_what_is_sent_is_taken_out_and_x_follows_x_prime(base) -> None:
    recipe = recipe_of(
        base, **NO_MASTERS, compression={"random_ratio": 1.0, "topk_ratio": 1.0, "quant_bits": 32}
    )
    peer = build_peer(load_trained(recipe, base), recipe, 2)
    local: Any = peer.trainer
    stepped(local, 3)
    before = local.flat.vector

    sent = peer.worker.start()
    peer.worker.finish(sent.packet, sent)  # alone in its swarm: C[D] = C[d_i]

    assert peer.worker.residual_norm() < 1e-6
    torch.testing.assert_close(local.flat.vector, before, rtol=0, atol=1e-6)
    torch.testing.assert_close(peer.worker.global_model.vector, before, rtol=0, atol=1e-6)


def test_without_masters_a_peer_comes_back_with_its_residual(base, tmp_path) -> None:
    recipe = recipe_of(base, **NO_MASTERS)
    peer, other = (build_peer(load_trained(recipe, base), recipe, 2) for _ in range(2))
    stepped(peer.trainer, 3)  # type: ignore[arg-type]
    peer_checkpoint.keep(peer, tmp_path / "kept", {})

    peer_checkpoint.restore(other, tmp_path / "kept")

    assert other.worker.residual_norm() == pytest.approx(peer.worker.residual_norm(), rel=1e-3)
    assert other.trainer.stepped


def test_the_state_of_eight_bits_goes_to_the_disk_and_back() -> None:
    table = torch.arange(11, dtype=torch.uint8).reshape(11, 1)
    for value in (table, 7, torch.tensor(0.5)):
        name, tensor = packed("state1", value)

        back = unpacked(name, tensor)

        assert tensor.dtype == torch.float32
        assert back[0] == "state1"
        assert torch.equal(back[1], value) if isinstance(value, torch.Tensor) else back[1] == value


@pytest.mark.parametrize("name", ["adafactor", "adamw_torch_fused", "sgd"])
def test_every_optimizer_of_torch_and_transformers_steps_and_is_kept(base, tmp_path, name: str) -> None:
    recipe = recipe_of(base, training={"optim": name}, model={"dtype": "bfloat16"})
    peer, other = (build_peer(load_trained(recipe, base), recipe, 2) for _ in range(2))
    local: Any = peer.trainer
    losses = stepped(local, 5)
    peer_checkpoint.keep(peer, tmp_path / "kept", {})
    peer_checkpoint.restore(other, tmp_path / "kept")

    assert losses[-1] < losses[0]
    again = [stepped(one, 1) for one in (local, other.trainer)]  # type: ignore[arg-type]
    assert again[0] == again[1]
    assert torch.equal(peer.worker.x, other.worker.x)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"])
def test_an_optimizer_whose_library_is_not_here_is_told_with_what_brings_it(monkeypatch, name: str) -> None:
    module, _ = EIGHT_BIT[name]
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed

    with pytest.raises(MissingPackage, match=name) as missing:
        eight_bit(name)

    assert missing.value.package == module.partition(".")[0]
    assert missing.value.hints == ("or training.optim=adamw_torch_fused",)


# ---- what a machine and a model can do -----------------------------------------------------------


def test_a_cpu_takes_fewer_samples_where_memory_is_short(base, monkeypatch) -> None:
    recipe = recipe_of(base)
    local = alone(base)

    assert micro_batch_for(local, recipe) == 8
    module = "recipes.training.micro_batch.host_memory"
    monkeypatch.setattr(module, lambda: HostMemory(10**9, 150_000_000))
    assert micro_batch_for(local, recipe) == 2
    assert guessed(recipe, local.sizes, 2) == 1  # of each of two processes
    local.in_memory = 3  # as a machine of a replica, of however many stages
    assert micro_batch_for(local, recipe) == 1
    monkeypatch.setattr(module, lambda: HostMemory(10**9, 0))
    assert micro_batch_for(local, recipe) == 1


@dataclass
class Device:
    """An accelerator on which a sequence takes `each` of the memory, beside `fixed`."""

    fixed: float
    each: float
    tried: list[int] = field(default_factory=list)

    def attempt(self, part: list[Any], aside: float) -> float:
        self.tried.append(len(part))
        share = self.fixed + self.each * len(part)
        if share > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return share


@pytest.mark.parametrize(
    ("fixed", "each", "fits"),
    [(0.1, 0.001, 64), (0.5, 0.049, 8), (0.5, 0.06, 4), (0.0, 0.12, 4), (0.6, 0.31, 1), (0.9, 0.2, 1)],
)
def test_the_largest_power_of_two_that_leaves_a_tenth_of_an_accelerators_memory_is_found(
    fixed: float, each: float, fits: int
) -> None:
    device = Device(fixed, each)

    assert tried(device, load_recipe("smoke")) == fits  # type: ignore[arg-type]
    assert max(device.tried) <= max(2, fits)  # once two sizes are known, a third is not tried in vain


def test_an_attention_that_a_class_has_not_is_told_with_what_it_has(tmp_path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIGS["gptj"]()).save_pretrained(tmp_path)
    recipe = recipe_of(tmp_path, model={"attn_implementation": "sdpa"})

    with pytest.raises(
        ModelError, match=r"GPTJForCausalLM has no attention `sdpa`.*auto, eager, flash_attention_2"
    ):
        check_trainable(recipe, tmp_path)
    check_trainable(recipe_of(tmp_path), tmp_path)


def test_flash_attention_is_left_to_machines_that_have_it() -> None:
    assert available_attention("flash_attention_2", "cpu") == "auto"
    assert available_attention("sdpa", "cpu") == "sdpa"


def test_a_quantized_base_without_its_library_is_told(base, monkeypatch) -> None:
    monkeypatch.setattr("recipes.models.causal_lm.find_spec", lambda name: None)

    with pytest.raises(MissingPackage, match="needs bitsandbytes"):
        load_trained(recipe_of(base, model={"load_in_4bit": True}, lora={}), base)
