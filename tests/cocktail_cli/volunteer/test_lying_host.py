"""A volunteer meets a host that lies: it ends with the host's fault, in a sentence, whatever it was sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from in_this_process import Run
from lying_hub import LyingHub, honest_files

from transport.protocol import messages

DEEP = 100_000
LIES = {
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "lists": b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "both": b'[{"a":' * DEEP + b"1" + b"}]" * DEEP,
    "number": b'{"a": ' + b"1" * 10**6 + b"}",
    "no UTF-8": b'{"a": "\xff"}',
    "no object": b"[1, 2]",
    "truncated": b'{"a": {"b": 1}, "c',
    "empty": b"",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return honest_files(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_of_the_model_that_nobody_could_read_is_the_hosts_fault(
    cocktail: Run, files: dict[str, bytes], name: str, lie: str
) -> None:
    with LyingHub({**files, name: LIES[lie]}) as hub:
        said = cocktail("join", hub.url, "-y", "--device", "cpu")

    assert messages.Get in hub.heard, "it was admitted, and has fetched"
    assert said.exit == 6, said.err
    assert f"error: the run's {name} cannot be used: " in said.err
    assert said.err.count("error: ") == 1


def test_a_file_larger_than_any_is_refused_before_it_is_fetched(
    cocktail: Run, files: dict[str, bytes], tmp_path: Path
) -> None:
    with LyingHub(files) as hub:
        grown = [
            messages.File(f.name, 1 << 39 if f.name == "tokenizer.json" else f.size, f.sha256)
            for f in hub.base
        ]
        welcome = messages.Welcome(1, "toy-run", "ann", "s" * 22, hub.recipe, "", grown, 0, 1.0)
        hub.lies = {messages.Hello: lambda _: [welcome]}
        said = cocktail("join", hub.url, "-y", "--device", "cpu")

    assert (said.exit, messages.Get in hub.heard) == (6, False)
    assert "the run's tokenizer.json has 549,755,813,888 bytes, which no model has" in said.err


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("command", ["status", "join"])
def test_a_status_that_is_none_is_the_hosts_fault(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch, command: str, lie: str
) -> None:
    """`join` asks for it before its question, where there is a terminal to ask at."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    text = LIES[lie].decode(errors="replace")
    with LyingHub(lies={messages.AskStatus: lambda _: [messages.Status(text)]}) as hub:
        said = cocktail(command, hub.url)

    assert messages.AskStatus in hub.heard
    assert said.exit == 6, said.err
    assert "the hub does not keep to the protocol: the hub's status cannot be read: " in said.err


@pytest.mark.parametrize(
    "field", ["peers", "step", "losses", "eta_s", "bottleneck", "culprits", "parameters"]
)
@pytest.mark.parametrize("value", ["A\x1b]52;c;cm0gLXJm\x07", [[1]], {"line": 1}, -1e300, 2**120])
def test_a_figure_of_another_kind_is_the_hosts_fault(cocktail: Run, field: str, value: object) -> None:
    with LyingHub(status={field: value}) as hub:
        said = cocktail("status", hub.url)

    assert messages.AskStatus in hub.heard
    assert said.exit == 6, said.err
    assert f"`$.{field}" in said.err


def test_a_hub_that_lacks_figures_and_has_others_is_read(cocktail: Run) -> None:
    """One of before, or of a later version."""
    people = {"peers": [{"name": "ann", "gpu": "RTX", "state": "training"}], "since": "yesterday"}
    with LyingHub(status=people) as hub:
        said = json.loads(cocktail("status", hub.url, "--json").out)
        shown = cocktail("status", hub.url, "--peers")

    assert (said["since"], said["eta_s"], said["peers"][0]["tokens"]) == ("yesterday", None, 0)
    assert "ann  RTX" in shown.out
