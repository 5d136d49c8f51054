"""The planner's memory: what it counts is what a process takes, and its formulas are those of the parts."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from recipes.config import Compression, Recipe, load_recipe
from recipes.planning import Machine, plan_memory
from recipes.planning.activations import LiveBytes
from recipes.planning.memory_plan import exchange_part

WIDTH = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
LENGTH = 32
CPU, GPU = Machine(1 << 40), Machine(1 << 40, gpu=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, and nothing beside it."""
    place = tmp_path_factory.mktemp("model")
    transformers.LlamaConfig(vocab_size=500, num_key_value_heads=2, **WIDTH).save_pretrained(place)
    return place


def recipe(*overrides: str) -> Recipe:
    return load_recipe("smoke", [f"data.max_length={LENGTH}", *overrides])


def test_storages_are_counted_while_they_live_and_views_are_not() -> None:
    alive = LiveBytes()
    with FakeTensorMode(), alive:
        a = torch.zeros(1000)
        b = a.view(10, 100).t()
        c = a + 1
        del a, b
        d = c * 2

    assert (alive.bytes, alive.most) == (8000, 8000)
    assert d.numel() == 1000


def test_products_are_counted_as_two_operations_an_element() -> None:
    alive = LiveBytes()
    with FakeTensorMode(), alive:
        torch.zeros(3, 5) @ torch.zeros(5, 7)

    assert alive.flops == 2 * 3 * 5 * 7


def test_the_vectors_follow_from_the_number_of_parameters(folder: Path) -> None:
    memory = plan_memory(recipe(), folder, 1, CPU)
    size = memory.parameters

    assert [memory.part(name) for name in ("common", "gradient", "optimizer")] == [
        4 * size,
        4 * size,
        8 * size,
    ]
    assert memory.part("weights") >= 4 * size
    assert plan_memory(recipe("optim=sgd"), folder, 1, CPU).part("optimizer") == 0


def test_activations_grow_with_the_micro_batch_and_nothing_else_does(folder: Path) -> None:
    one, four = plan_memory(recipe(), folder, 1, CPU), plan_memory(recipe(), folder, 4, CPU)

    grown = {p.name for p, q in zip(one.parts, four.parts, strict=True) if q.bytes > p.bytes}
    assert grown == {"activations", "logits"}
    assert 3.8 < four.part("activations") / one.part("activations") <= 4.01


def test_logits_are_kept_in_float32_with_their_gradient(folder: Path) -> None:
    logits = 2 * LENGTH * 500 * 4

    assert 2 * logits < plan_memory(recipe(), folder, 2, CPU).part("logits") < 5 * logits


def test_the_work_of_a_pass_is_six_operations_a_parameter_and_token(folder: Path) -> None:
    memory = plan_memory(recipe(), folder, 2, CPU)
    products = memory.parameters - 500 * 64  # the embedding is looked up
    attention = 12 * 2 * 64 * LENGTH  # a token: layers, width, length

    assert memory.flops == pytest.approx((6 * products + attention) * 2 * LENGTH, rel=0.1)


def test_checkpointing_keeps_less_and_computes_more(folder: Path) -> None:
    kept = plan_memory(recipe(), folder, 4, CPU)
    twice = plan_memory(recipe("activation_checkpointing=true"), folder, 4, CPU)

    assert twice.part("activations") < kept.part("activations") / 3
    assert twice.flops > 1.15 * kept.flops


def test_half_precision_halves_the_copy_and_the_gradient_and_adds_to_the_masters(folder: Path) -> None:
    full, half = (
        plan_memory(recipe(f"model.dtype={kind}"), folder, 2, CPU) for kind in ("float32", "bfloat16")
    )
    size = full.parameters

    assert [half.part(name) for name in ("weights", "copy", "gradient")] == [4 * size, 2 * size, 2 * size]
    assert half.part("activations") < full.part("activations")
    assert plan_memory(recipe(), folder, 2, GPU).part("activations") < full.part("activations")  # autocast


def test_adapters_are_what_grows_and_the_base_is_held_as_it_is(folder: Path) -> None:
    lora = ("lora.lora_r=4", "model.dtype=bfloat16")
    full, adapters = plan_memory(recipe(), folder, 1, CPU), plan_memory(recipe(*lora), folder, 1, CPU)
    four = plan_memory(recipe(*lora, "load_in_4bit=true"), folder, 1, CPU)
    nested = [*lora, "load_in_4bit=true", "bnb_4bit_use_double_quant=true"]
    assert 0.8 < plan_memory(recipe(*nested), folder, 1, CPU).part("base") / four.part("base") < 1

    assert adapters.parameters < full.parameters / 4
    assert adapters.part("gradient") == 4 * adapters.parameters
    assert 2 * full.parameters <= adapters.part("base") < 2.1 * full.parameters
    assert four.part("base") < 0.7 * adapters.part("base")


def test_the_common_model_goes_to_the_host_where_it_is_sent_or_room_is_short(folder: Path) -> None:
    def away(machine: Machine, *overrides: str) -> bool:
        return any(
            p.name == "common" and p.host for p in plan_memory(recipe(*overrides), folder, 1, machine).parts
        )

    assert away(GPU, "state_device=cpu")
    assert away(Machine(1 << 20, gpu=True))
    assert not away(GPU)
    assert not away(CPU, "state_device=cpu")
    beside = plan_memory(recipe("state_device=accelerator"), folder, 1, GPU).bytes
    assert away(Machine(int(beside / 0.91), gpu=True))
    assert not away(Machine(int(beside / 0.89), gpu=True))


def test_a_peer_over_four_devices_has_a_quarter_of_its_vectors_on_each(folder: Path) -> None:
    one, four = (plan_memory(recipe(), folder, 1, Machine(1 << 40, True, count)) for count in (1, 4))

    assert four.part("optimizer") == -(-one.part("optimizer") // 4)
    assert four.part("activations") == one.part("activations")
    assert four.part("gathered") > 0
    assert [part.host for part in four.parts if part.name == "exchange"] == [True]


def test_a_smaller_sample_needs_less_to_encode() -> None:
    small, large = (exchange_part(Compression(random_ratio=p), 10**8, 10**12).bytes for p in (0.05, 0.1))

    assert large == pytest.approx(2 * small, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.skipif(sys.platform != "linux", reason="how much a process holds is read from /proc")
def test_the_plan_is_within_a_tenth_of_what_a_process_takes_and_so_is_each_part(root: Path) -> None:
    """Three architectures: eager attention and sdpa, grouped heads, tied and untied embeddings."""
    asked = ("--only", "gptj,qwen3,gpt-neox", "--length", "128")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.memory", *asked],
        cwd=root, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    head, _, *lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in done.stdout.splitlines()]
    compared = set()
    for planned, measured in zip(lines[::3], lines[1::3], strict=True):
        measured_whole = float(measured[-1])
        for part, plan, found in zip(head, map(float, planned), map(float, measured), strict=True):
            if part == "rest":  # the allocator's and Python's: it differs by 11 MB from machine to machine
                assert found < 0.05 * measured_whole, done.stdout
            elif max(plan, found) > 10:  # MB: below that it is the allocator and Python that are measured
                assert plan == pytest.approx(found, rel=0.1), f"{part}: {done.stdout}"
                compared.add(part)
    assert len(lines) == 3 * 3
    assert compared >= {"weights", "common", "gradient", "optimizer"}
    assert compared >= {"activations", "logits", "exchange", "whole"}
