"""A GPU that only emulates bfloat16 computes in float16; where the recipe insists, in bfloat16."""

from pathlib import Path
from typing import Any

import fake_cuda as fake
import pytest
import torch
from a_peer import Hub, peer_on, recipe_of
from test_loop import OneRound
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from cocktail_cli.machine import weaknesses
from recipes.config import Recipe
from recipes.hardware import half_precision
from recipes.models import load_trained
from recipes.training import StepDone, finetune

FEW = 128
NEW, T4, P100 = (8, 0), (7, 5), (6, 0)


@pytest.mark.parametrize(
    ("capability", "asked", "half"),
    [
        (NEW, {}, torch.bfloat16),
        (T4, {}, torch.float16),
        (T4, {"bf16": True}, torch.bfloat16),
        (T4, {"bf16": False}, None),
        (P100, {}, None),
    ],
)
def test_the_half_precision_of_training_follows_the_capability(
    capability: tuple[int, int], asked: dict[str, bool], half: torch.dtype | None
) -> None:
    fake.machine.capability = capability
    wanted = recipe_of(asked)
    peer, hub = peer_on("cuda", wanted, FEW), Hub(wanted, [OneRound(0, 0)], side=FEW)
    (step,) = (event for event in finetune(hub, peer, now=0) if isinstance(event, StepDone))

    assert peer.trainer.half == half
    assert (peer.trainer.scale.value > 1) == (half == torch.float16)
    assert step.loss == pytest.approx(torch.log(torch.tensor(float(FEW))).item(), rel=0.05)


@pytest.mark.parametrize(("capability", "dtype"), [(NEW, torch.bfloat16), (T4, torch.float16)])
def test_a_frozen_base_stored_in_bfloat16_is_loaded_as_the_device_computes(
    capability: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    fake.machine.capability = capability
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    plain = recipe_of().model_dump(exclude_unset=True)
    model_keys = {"model": {"model_name_or_path": str(tmp_path)}}
    adapted = Recipe.model_validate({**plain, **model_keys, "lora": {"lora_r": 4}})
    loaded = load_trained(adapted, tmp_path, "cuda")

    assert {p.dtype for p in loaded.parameters() if not p.requires_grad} == {dtype}
    assert {p.dtype for p in loaded.parameters() if p.requires_grad} == {torch.float32}
    assert half_precision(torch.device("cuda:1")).dtype == dtype


@pytest.mark.parametrize(
    ("kernels", "used"),
    [
        (lambda model: setattr(model, "fused", True), True),
        (lambda model: model.lm_head.weight.data.mul_(1.01), False),
        (None, False),  # liger-kernel's own, all of which Triton's interpreter cannot run
    ],
    ids=["the same losses", "others", "not there"],
)
def test_fused_kernels_are_used_where_a_trial_on_the_device_has_the_same_losses(
    kernels: Any, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    if kernels is not None:
        monkeypatch.setattr("recipes.models.fused_kernels.apply", kernels)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)
    before = dict(vars(modeling_llama))
    loaded: Any = load_trained(recipe_of(), tmp_path, "cuda")

    assert vars(modeling_llama) == before
    assert getattr(loaded, "fused", False) is used
    assert loaded.forward.__module__ == modeling_llama.__name__


@pytest.mark.parametrize(
    ("capability", "words", "native"),
    [(NEW, "bf16, capability 8.0", True), (T4, "fp16 (it only emulates bf16), capability 7.5", False)],
)
def test_doctor_plan_and_join_know_what_the_device_emulates(
    capability: tuple[int, int], words: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.machine.capability = capability

    assert [*weaknesses(["cuda"], recipe_of())] == []
    said = [*weaknesses(["cuda"], recipe_of({"bf16": True}))]
    assert ["only emulates bfloat16" in line for line in said] == ([] if native else [True])

    doctor = pytest.importorskip("cocktail_cli.extensions.doctor.command")  # a project may be without them
    gpus = pytest.importorskip("cocktail_cli.extensions.plan.gpu_table")
    monkeypatch.setattr(gpus, "measured", lambda device, dtype: 1.0)  # a fake device is slow
    assert words in doctor.accelerator("cuda:1").text
    assert gpus.this_machine("cuda").bf16 is native
