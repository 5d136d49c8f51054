"""A volunteer is asked first, and told what is trained, on what, for how long, at what cost."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cocktail_cli.errors import Failure
from cocktail_cli.machine import Glance, glance
from cocktail_cli.volunteer import DownloadPlan, JoinQuestion, Offer, VolunteerLimits
from cocktail_cli.volunteer.join_prompt import question_lines, wrap_line
from recipes.config import load_recipe
from recipes.hardware import usable_cores
from transport import RunKeys
from transport.peer import RunPreview
from transport.protocol import messages

WEIGHTS = messages.File("model.safetensors", 4_100_000, "ab" * 32)
STATUS = {"state": "running", "step": 12, "max_steps": 100, "eta_s": 240, "peers": [{}, {}]}
STATUS |= {"parameters": 1_010_000, "needs": {"memory": 1 << 30, "packet": 15_200}}


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCKTAIL_HOME", str(tmp_path))


def asked(*overrides: str, status: dict[str, Any] = STATUS, **limits: Any) -> list[str]:
    recipe = load_recipe("smoke", list(overrides))
    welcome = messages.Welcome(
        messages.PROTOCOL,
        "amber-otter-42",
        "",
        "",
        recipe.to_json(),
        "9f" * 32,
        [WEIGHTS],
        12,
        1.0,
        log_bytes=400_000,
    )
    offer = Offer(VolunteerLimits("vm", [], **limits), Glance("RTX 3090, 24 GiB", 24 << 30), [])
    plan = DownloadPlan(welcome, None)
    return list(question_lines(RunPreview(status, welcome), plan, offer))


def bullet(lines: list[str], label: str) -> str:
    (text,) = [line.removeprefix(f"- {label}").strip() for line in lines if line.startswith(f"- {label} ")]
    return text


def test_the_question_names_what_is_trained_on_what_for_how_long_and_what_it_takes() -> None:
    lines = asked()

    assert lines[0].startswith("amber-otter-42: One minute on a CPU. A tiny GPT-NeoX learns")
    assert bullet(lines, "trains") == "all 1.0M parameters of builtin:tiny-gpt-neox"
    assert bullet(lines, "on") == "builtin:python-docs"
    assert bullet(lines, "takes") == "step 12 of 100, about 4 min left, with 2 peers"
    assert bullet(lines, "downloads") == "4.5 MB (base model and updates)"
    assert bullet(lines, "uses") == (
        "RTX 3090, 24 GiB, about 1.8 of 24.0 GiB of its memory; sends and receives about 15.2 kB a step"
    )
    assert bullet(lines, "never").startswith(
        "runs code of the host, reads or sends your files, opens no port"
    )


def test_the_question_names_adapters_limits_and_no_path_of_the_host() -> None:
    lines = asked("lora.lora_r=8", "datasets.0.path=/home/dana/secret/rows.jsonl", max_up=625_000.0)

    assert bullet(lines, "trains") == "adapters (LoRA, 1.0M parameters) on builtin:tiny-gpt-neox"
    assert bullet(lines, "on") == "rows.jsonl"
    assert bullet(lines, "uses").endswith("a step, at most 5 Mbit/s up")


@pytest.mark.parametrize(
    ("gated", "terms"),
    [
        (False, "llama3.1"),
        (
            True,
            "llama3.1; gated: you fetch it from the Hugging Face hub with your own account, which must have "
            "accepted the licence at https://huggingface.co/meta/otter",
        ),
    ],
)
def test_the_question_names_the_licence_and_the_size(
    monkeypatch: pytest.MonkeyPatch, gated: bool, terms: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WEIGHTS", replace(WEIGHTS, gated=gated))
    lines = asked("model_name_or_path=meta/otter", status=STATUS | {"licence": "llama3.1"})

    assert bullet(lines, "licence") == terms
    assert bullet(lines, "downloads").startswith("4.5 MB")


def test_what_the_hub_does_not_say_is_left_out() -> None:
    lines = asked(status=STATUS | {"eta_s": None, "needs": {}, "peers": []})

    assert bullet(lines, "takes") == "step 12 of 100, with nobody else yet"
    assert bullet(lines, "uses") == "RTX 3090, 24 GiB"


def test_lines_are_broken_between_words_below_their_text() -> None:
    line = "- downloads 65.5 kB (base model and updates; 4.1 MB are here)"

    assert wrap_line(line, 80) == [line]
    assert wrap_line(line, 45) == [
        "- downloads 65.5 kB (base model and updates;",
        "            4.1 MB are here)",
    ]


def test_a_machine_that_falls_short_is_told_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    url = RunKeys.generate().url("127.0.0.1", 1, "amber-otter-42")
    recipe = load_recipe("smoke", ["swarm.requires.vram=80GB"])
    welcome = messages.Welcome(
        messages.PROTOCOL, url.run, "", "", recipe.to_json(), "9f" * 32, [WEIGHTS], 12, 1.0
    )
    offer = Offer(VolunteerLimits("vm", []), Glance("RTX 3090, 24 GiB", 24 << 30), [])

    short = pytest.raises(Failure, match=r"80\.0 GB of memory needed, 25\.8 GB here")
    with JoinQuestion(url, offer) as question, short:
        question._checked(RunPreview(STATUS, welcome))


def test_a_glance_names_the_processor_where_that_is_asked_for() -> None:
    assert glance("cpu") == Glance(f"CPU, {usable_cores()} cores", glance("cpu").memory)
    assert glance("cpu").memory > 1 << 28


ORDER = """
import sys, typer
from transport import Hub, Ledger, RunKeys, RunSettings
from recipes.config import load_recipe

class Nothing:  # a delegate that is asked for nothing: no peer joins
    aggregate = inherit = committed = None

recipe = load_recipe("smoke")
settings = RunSettings("toy-run", recipe.to_json(), "9f" * 32, samples=800, global_batch=8)
with Ledger(sys.argv[1], run=settings.run, samples=800) as ledger:
    keys = RunKeys.generate()
    hub = Hub(("127.0.0.1", 0), keys, ledger, settings, Nothing())
    hub.start()
    url = str(keys.url("127.0.0.1", hub.port, settings.run))

    def heavy():
        return sorted({"torch", "transformers", "datasets", "peft", "numba"} & sys.modules.keys())

    def confirm(question, **_):
        print("ASKED", question, heavy())
        return False

    from cocktail_cli.ui.display import PlainView
    show = PlainView.show
    def shown(view, event):
        print("SAID", type(event).__name__, getattr(event, "state", ""), heavy())
        show(view, event)

    PlainView.show, typer.confirm, sys.stdin.isatty = shown, confirm, lambda: True
    sys.argv = ["cocktail", "join", url, "--name", "vm"]
    from cocktail_cli.main import app
    app(standalone_mode=False)
    hub.stop(now=True)
    hub.join(120)
"""


@pytest.mark.slow
def test_the_first_word_and_the_question_come_before_torch_is_imported(tmp_path: Path) -> None:
    environment = os.environ | {"COCKTAIL_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [sys.executable, "-c", ORDER, str(tmp_path / "ledger")],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        check=False,
    )

    said = [line for line in ran.stdout.splitlines() if line.startswith(("SAID", "ASKED"))]
    assert [line.split()[:3] for line in said] == [
        ["SAID", "Progressed", "dialling"],
        ["ASKED", "Join", "as"],
    ], ran.stderr
    assert all(line.endswith("[]") for line in said), said
    assert "not joined: nothing was downloaded" in ran.stderr


AWAY = """
import sys
from cocktail_cli.main import app
from transport.protocol import Unreachable

sys.argv = ["cocktail", "join", sys.argv[1], "-y"]
try:
    app(standalone_mode=False)
except Unreachable:
    print("UNREACHABLE", sorted({"torch", "transformers", "datasets"} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_a_hub_that_is_away_is_told_before_torch_is_imported_also_with_yes(tmp_path: Path) -> None:
    url = str(RunKeys.generate().url("127.0.0.1", 1, "amber-otter-42"))
    ran = subprocess.run(
        [sys.executable, "-c", AWAY, url],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"COCKTAIL_HOME": str(tmp_path)},
        check=False,
    )

    assert ran.stdout.splitlines()[-1:] == ["UNREACHABLE []"], ran.stderr
