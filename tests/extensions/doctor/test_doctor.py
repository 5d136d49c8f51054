"""`cocktail doctor`: a line for each thing that can be wrong, with its fix, whatever else breaks."""

import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile_words import WORDS, safe
from in_this_process import Run
from local_hub import TOKEN, LocalHub, ask_only
from lying_host import lying_host
from stalling_hub import Material, stalling_hub

from cocktail_cli.extensions.doctor import command as doctor
from cocktail_cli.extensions.doctor.command import HubAnswer, driver_version, gated_models, pace, users_of
from cocktail_cli.machine import nvml
from recipes.config import load_recipe
from recipes.hardware import HostMemory
from transport import RunKeys
from transport.protocol import messages

SHUT = 1  # a port of the loopback at which nothing listens


def of(findings: str, about: str) -> dict[str, str]:
    return next(f for f in json.loads(findings)["findings"] if f["about"] == about)


def test_doctor_prints_a_line_for_each_check(cocktail: Run) -> None:
    said = cocktail("doctor", "--device", "cpu")

    assert said.exit == 0
    told = [line.split()[1] for line in said.out.splitlines()]
    assert told == [
        "python",
        "packages",
        "device",
        "memory",
        "transport",
        "codec",
        "disk",
        "files",
        "port",
        "proxy",
        "address",
        "power",
        "hub",
    ]
    assert "not asked: HF_HUB_OFFLINE is set" in said.out


def test_a_missing_device_is_exit_4(cocktail: Run) -> None:
    said = cocktail("doctor", "--device", "cuda:7", "--json")

    assert said.exit == 4
    assert of(said.out, "device")["level"] == "fail"


def test_a_port_in_use_is_reported(cocktail: Run) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        said = cocktail("doctor", "--port", str(taken.getsockname()[1]), "--json")

    assert of(said.out, "port")["level"] == "warn"


def test_a_check_that_raises_does_not_end_the_others(cocktail: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise OSError("the disk does not answer")

    monkeypatch.setattr(doctor.shutil, "disk_usage", broken)
    said = cocktail("doctor", "--json")

    assert "the disk does not answer" in of(said.out, "disk")["text"]
    assert of(said.out, "port")


@pytest.mark.parametrize(
    ("answer", "level", "words"),
    [
        (HubAnswer("https://hf", error="no route"), "warn", "does not answer: no route"),
        (HubAnswer("https://hf", skew=0.5), "ok", "no token, which gated models need"),
        (HubAnswer("https://hf", token=True, skew=0.5), "warn", "does not take this machine's token"),
        (HubAnswer("https://hf", token=True, user="dana", skew=0.5), "ok", "logged in as dana"),
    ],
)
def test_doctor_shows_the_answer_of_the_hugging_face_hub(
    monkeypatch: pytest.MonkeyPatch, answer: HubAnswer, level: str, words: str
) -> None:
    monkeypatch.setattr("cocktail_cli.extensions.doctor.command.ask_hub", lambda timeout: answer)

    found = next(doctor.hub())

    assert (found.level, words in found.text) == (level, True)


def test_a_gated_model_is_one_that_this_machines_token_may_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with LocalHub() as there:
        ask_only(there, monkeypatch, tmp_path / "cache")
        for kind in ("open", "gated"):
            there.add(f"a/{kind}", {"config.json": b"{}"}, gated=kind == "gated")

        assert [*gated_models(["a/open", "a/gated", "a/missing"])] == ["a/gated"]
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert [*gated_models(["a/gated"])] == []


def test_without_a_driver_nobody_uses_the_gpus() -> None:
    if nvml() is not None:
        pytest.skip("this machine has NVIDIA's driver")

    assert driver_version() is None
    assert users_of("cuda:0") == []


def test_a_clock_that_is_four_minutes_behind_fails() -> None:
    assert doctor.clock(240.0).level == "fail"
    assert doctor.clock(-0.7).level == "ok"


@pytest.mark.parametrize(
    ("folders", "level", "words"),
    [
        (("conda-meta",), "ok", "conda environment tuned"),
        (("conda-meta", "condabin"), "warn", "in conda's base environment"),
        ((), "warn", "no environment of its own"),
    ],
)
def test_an_environment_of_conda_is_one_unless_it_is_condas_own(
    folders: tuple[str, ...], level: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "tuned"
    for folder in folders:
        (prefix / folder).mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "base_prefix", str(prefix))  # conda makes no venv

    finding = doctor.python()

    assert (finding.level, words in finding.text) == (level, True)


def test_a_laptop_on_battery_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for plugged in (True, False, None):
        battery = SimpleNamespace(percent=80, secsleft=60, power_plugged=plugged)
        monkeypatch.setattr("psutil.sensors_battery", lambda battery=battery: battery, raising=False)
        said.append(doctor.power().level)

    assert said == ["ok", "warn", "ok"]


def test_memory_that_a_container_keeps_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host_memory", lambda: HostMemory(1 << 30, 1 << 29))

    finding = doctor.memory()

    assert finding.level == "warn"
    assert finding.text.startswith("1.0 GiB, 0.5 GiB of it free; a container or cgroup keeps")


def test_a_low_limit_of_open_files_is_a_warning_with_the_command_that_raises_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))

    assert doctor.files().hint == "ulimit -n 1024"


def test_doctor_without_ipv4_says_what_this_machine_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "leads_there", lambda family, there: family == socket.AF_INET6)
    finding = doctor.address()

    assert finding.level == "warn"
    assert "IPv6" in finding.text


def test_doctor_prints_an_environment_to_paste_into_an_issue(cocktail: Run) -> None:
    said = cocktail("doctor", "--env")

    assert (said.exit, said.out.startswith("- cocktail ")) == (0, True)
    assert "transformers" in said.out


def test_doctor_says_which_layer_of_the_connection_to_a_run_failed(cocktail: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = str(RunKeys.generate().url("127.0.0.1", port, "amber-otter-42"))
    said = cocktail("doctor", url, "--json")

    assert said.exit == 4
    assert of(said.out, "run")["level"] == "fail"


def test_doctor_says_what_a_line_means_for_the_run() -> None:
    status = {"parameters": 1_000_000, "local_steps": 1, "peers": [{"compute_s": 20.0, "rounds": 10}]}
    status["peer_count"] = 1
    recipe = load_recipe("smoke").to_json()

    good, tight, thin = (pace(status, recipe, rate, 10 * rate) for rate in (1e6, 6e3, 500.0))

    assert (good.level, thin.level) == ("ok", "warn")
    assert good.text.startswith("rounds of 2.0 s, of which 2.0 s compute (100%), at p 0.113, K 0.2, 2 bits; ")
    assert "this line's K is 0.2;" in good.text
    assert "(100%)" in tight.text
    assert "K is 0.2;" not in tight.text, "it sends less, so the compute hides it"
    assert thin.text.endswith("the bottleneck is this line's up")
    longer = {"local_steps": 2, "rung": "p 0.0264, K 0.2, 1 bit, 2 rounds in flight, 2 local steps"}
    assert " and 2 steps, of which" in pace(status | longer, recipe, 1e6, 1e7).text


@pytest.mark.slow
def test_doctor_joins_a_run_and_leaves_it(cocktail: Run, tmp_path: Path) -> None:
    material = Material.prepare(tmp_path / "base")
    with stalling_hub(material, tmp_path / "ledger") as running:
        said = cocktail("doctor", str(running.url), "--json")

    assert said.exit == 0, said.out
    assert "waiting, step 0/1000, 0 peers" in of(said.out, "run")["text"]
    assert "codec 1" in of(said.out, "versions")["text"]
    lines = [one["text"] for one in json.loads(said.out)["findings"] if one["about"] == "line"]
    assert "Mbit/s down" in lines[0]
    assert "Mbit/s up" in lines[1]
    assert "no peer has trained yet" in of(said.out, "pace")["text"]
    assert running.left("doctor") == ["left: the doctor has seen enough"]


def test_doctor_shares_the_hubs_line_where_it_bounds_the_rounds() -> None:
    status = {"parameters": 1_000_000, "local_steps": 2, "peers": [{"compute_s": 20.0, "rounds": 10}]}
    bottleneck = {"line": "the hub's up", "waiting": 0.5, "bytes_per_s": 1000}
    status |= {"peer_count": 1, "bottleneck": bottleneck}
    recipe = load_recipe("smoke").to_json()

    shared = pace(status, recipe, 1e6, 1e7)
    passed = pace(status | {"local_steps": 1, "passing": True}, recipe, 1e6, 10.0)

    assert shared.text.endswith("the bottleneck is the hub's up"), (
        "its line carries more than its part of that"
    )
    assert passed.text.startswith("rounds of 5.1 s"), "what the hub alone sends is no bound"


def test_a_doctor_tells_a_runs_words_as_words(cocktail: Run) -> None:
    lies = {messages.Hello: lambda _: [messages.Refused("full", WORDS)]}
    with lying_host(status={"reason": WORDS, "state": WORDS}, lies=lies) as hub:
        said = cocktail("doctor", hub.url)

    assert messages.Hello in hub.heard
    assert safe(said.out + said.err)
    assert "A?]52;c;" in said.out
    assert all(line.startswith(("ok ", "warn ", "fail ")) for line in said.out.splitlines())
