"""`cocktail plan`: what it adds up is what it says, and its one hint is a change that helps."""

import json

import pytest
from in_this_process import Run

from cocktail_cli.errors import Failure
from cocktail_cli.extensions.plan.command import CARRIES
from cocktail_cli.extensions.plan.gpu_table import GPUS, Gpu, gpu_of
from cocktail_cli.machine import GIB

SMALL = ("plan", "smoke", "--gpu", "t4", "--peers", "4")


def test_a_plan_adds_up(cocktail: Run) -> None:
    said = json.loads(cocktail(*SMALL, "--lines", "10", "--price", "0.5", "--json").out)
    memory, time, traffic = said["memory"], said["time"], said["traffic"]

    on_the_device = [part["bytes"] for part in memory["parts"] if not part["host"]]
    assert memory["bytes"] == sum(on_the_device) + memory["runtime"]
    assert memory["fits"]
    assert traffic["up_s"] == pytest.approx(8 * traffic["packet"] / (CARRIES * 10e6))
    assert time["step_s"] == max(time["compute_s"], time["exchange_s"])
    assert time["hours"] == pytest.approx(time["step_s"] * 100 / 3600)
    assert time["cost"] == pytest.approx(time["hours"] * 4 * 0.5)


def test_a_plan_says_what_a_thin_hub_costs_and_which_line_it_is(cocktail: Run) -> None:
    lines = (*SMALL, "--step-time", "10ms", "--lines", "20/100", "--json", "compression.local_steps=1")
    good = json.loads(cocktail(*lines).out)["line"]
    thin = json.loads(cocktail(*lines, "--lines", "hub=1/100").out)["line"]

    assert good["bottleneck"] == "the compute"
    assert thin["bottleneck"] == "the hub's up"
    assert thin["computing"] < good["hub_alike"]["computing"] <= good["computing"]


@pytest.mark.parametrize("text", ["20mbit", "0/100", "1e9", "hub=", "peers=20/100", "listen=-1", "20/100/5"])
def test_a_line_that_is_none_is_a_usage_error_with_the_form(cocktail: Run, text: str) -> None:
    said = cocktail("plan", "smoke", "--lines", text)

    assert said.exit == 2
    assert f"--lines {text}: no line is written so" in said.err
    assert "20/100; of the hub: hub=100/100; listen=4" in said.err


def test_the_rung_follows_the_line_and_a_recipe_that_writes_its_own_is_told_of_it(cocktail: Run) -> None:
    lines = (*SMALL, "--step-time", "1s", "--json")
    wide = json.loads(cocktail(*lines, "--lines", "20").out)
    thin = json.loads(cocktail(*lines, "--lines", "0.008", "compression.auto=false").out)

    assert wide["line"]["rung"] == thin["line"]["rung"] == "p 0.113, K 0.2, 2 bits"
    assert thin["hint"].startswith("compression.auto=true lets devices compute 100% of the time")
    assert thin["hint"].endswith("local steps")


def test_a_plan_is_four_lines_for_people_and_a_word_for_scripts(cocktail: Run) -> None:
    lines = cocktail(*SMALL).out.splitlines()

    assert [line.split()[0] for line in lines if line[0] != " "] == [
        "model",
        "memory",
        "traffic",
        "line",
        "step",
        "time",
        "loss",
        "disk",
        "hint",
    ]
    assert cocktail(*SMALL, "--quiet").out == "fits\n"


def test_a_plan_repeats_what_was_typed_and_a_launch_takes(cocktail: Run) -> None:
    typed = "smoke seed=3 --peers 2 --device cpu --micro-batch-size 4"
    here = cocktail("plan", *typed.split(), "--lines", "20/100").err
    elsewhere = cocktail("plan", "smoke", "--peers", "2", "--gpu", "t4", "--micro-batch-size", "4").err

    assert f"Next: cocktail launch {typed}\n" in here
    assert "Next: cocktail launch smoke --micro-batch-size 4\n" in elsewhere, "those peers are volunteers"


def test_a_plan_says_what_host_and_peer_need_on_their_disks(cocktail: Run) -> None:
    said = [json.loads(cocktail(*SMALL, f"max_steps={steps}", "--json").out) for steps in (100, 100_000)]
    (few, many), vector = [one["disk"] for one in said], 4 * said[0]["parameters"]

    assert many["host"]["packets"] == pytest.approx(1000 * few["host"]["packets"])
    assert few["host"]["updates"] == pytest.approx(4 * few["host"]["packets"], rel=0.01)
    assert many["host"]["updates"] == (8 << 20) + vector, "of the last rounds, and the error feedback itself"
    assert few["peer"] == {"base": 4_051_968, "checkpoint": 4 * vector}


def test_a_plan_that_does_not_fit_is_exit_4_with_a_change_that_fits(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocktail_cli.extensions.plan.command.RUNTIME", 0)
    one, eight = (
        json.loads(cocktail(*SMALL, "--micro-batch-size", size, "--json").out)["memory"]["bytes"]
        for size in ("1", "8")
    )
    between = (one + eight) / 2 / GIB
    monkeypatch.setitem(GPUS, "small-1g", Gpu("small-1g", between, 1, 1))
    fixed = ("plan", "smoke", "per_device_train_batch_size=8", "--gpu", "small-1g")

    said = cocktail(*fixed, "--json")
    hint = json.loads(said.out)["hint"].split()
    again = cocktail(*fixed, *hint[:2], "--quiet")
    auto = cocktail("plan", "smoke", "--gpu", "small-1g", "--quiet")

    assert (said.exit, hint[0]) == (4, "--micro-batch-size")
    assert (again.exit, again.out) == (0, "fits\n")
    assert auto.out == "fits\n"  # where the recipe leaves it open, a smaller one is taken


def test_a_slow_line_is_the_bottleneck_and_the_hint_hides_it(cocktail: Run) -> None:
    slow = (*SMALL, "--lines", "1", "--step-time", "100ms", "compression.auto=false")
    before = json.loads(cocktail(*slow, "--json").out)
    change = before["hint"].split()[0]
    after = json.loads(cocktail(*slow, change, "--json").out)

    assert (before["bottleneck"], after["bottleneck"]) == ("network", "compute")
    assert change.startswith("compression.topk_ratio=")


def test_a_gpu_that_emulates_bf16_is_planned_in_fp16_unless_the_recipe_insists(cocktail: Run) -> None:
    said = [json.loads(cocktail(*SMALL, f"bf16={how}", "--json").out) for how in ("auto", "true", "false")]
    new = json.loads(cocktail(*SMALL[:3], "l4", "--json").out)

    assert [one["precision"] for one in said] == ["float16", "bfloat16", "float32"]
    fast, emulated, single = (one["time"]["compute_s"] for one in said)
    assert emulated == pytest.approx(single)
    assert fast == pytest.approx(single * 8.1 / 65)
    assert new["precision"] == "bfloat16"


def test_a_fresh_exchange_is_added_to_the_compute(cocktail: Run) -> None:
    said = json.loads(cocktail(*SMALL, "staleness=0", "--step-time", "2s", "--json").out)

    assert said["time"]["step_s"] == pytest.approx(2 + said["time"]["exchange_s"])


def test_with_rounds_in_flight_a_step_takes_the_longer_direction_and_not_both(cocktail: Run) -> None:
    thin = (*SMALL, "--step-time", "1ms", "--lines", "1", "compression.auto=false", "--json")
    one, two = (json.loads(cocktail(*thin, f"staleness={s}").out) for s in (1, 2))

    assert one["time"]["step_s"] == pytest.approx(one["traffic"]["up_s"] + one["traffic"]["down_s"])
    assert two["time"]["step_s"] == pytest.approx(two["traffic"]["up_s"])


def test_with_local_steps_the_exchange_is_shared_by_the_steps_between_two(cocktail: Run) -> None:
    thin = (*SMALL, "staleness=0", "--step-time", "1s", "--lines", "0.1", "--json")
    one, ten = (json.loads(cocktail(*thin, f"local_steps={h}").out) for h in (1, 10))

    assert one["traffic"]["packet"] == ten["traffic"]["packet"]
    assert ten["time"]["exchange_s"] == pytest.approx(one["time"]["exchange_s"] / 10)
    assert ten["time"]["step_s"] == pytest.approx(1 + ten["time"]["exchange_s"])
    assert (one["bottleneck"], ten["bottleneck"]) == ("network", "compute")


def test_a_gpu_is_found_with_and_without_its_size() -> None:
    assert gpu_of("a100-80g").bytes == int(79.1 * GIB)
    assert gpu_of("RTX 4090").name == "rtx-4090-24g"
    with pytest.raises(Failure, match="no such device"):
        gpu_of("a100")


def test_the_error_of_a_misspelt_gpu_names_the_nearest_one() -> None:
    with pytest.raises(Failure) as caught:
        gpu_of("rtx-4080")

    assert caught.value.hints[0].startswith("did you mean rtx-40")


def test_a_recipe_alone_does_not_allow_model_code(cocktail: Run) -> None:
    said = cocktail("plan", "smoke", "model.trust_remote_code=true")

    assert said.exit == 2
    assert "--trust-remote-code, if you trust whoever wrote it" in said.err
