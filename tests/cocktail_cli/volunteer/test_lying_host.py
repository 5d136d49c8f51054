"""A volunteer meets a host that lies: it ends with the host's fault, in a sentence, whatever it was sent."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile_words import WORDS, safe, texts_in
from in_this_process import Run, Said
from lying_host import honest_files, lying_host
from test_run_registry import record

from cocktail_cli.machine import save_run
from recipes.config import load_recipe, recipe_from_json
from transport import parse_url
from transport.protocol import messages

DEEP = 20_000  # a hub has 256 KiB for a message
LIES = {
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "lists": b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "both": b'[{"a":' * DEEP + b"1" + b"}]" * DEEP,
    "number": b'{"a": ' + b"1" * 10**5 + b"}",
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
    with lying_host({**files, name: LIES[lie]}) as hub:
        said = cocktail("join", hub.url, "-y", "--device", "cpu")

    assert messages.Get in hub.heard, "it was admitted, and has fetched"
    assert said.exit == 6, said.err
    assert f"error: the run's {name} cannot be used: " in said.err
    assert said.err.count("error: ") == 1


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("command", ["status", "join"])
def test_a_status_that_is_none_is_the_hosts_fault(
    cocktail: Run, monkeypatch: pytest.MonkeyPatch, command: str, lie: str
) -> None:
    """`join` asks for it before its question, where there is a terminal to ask at."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    text = LIES[lie].decode(errors="replace")
    with lying_host(lies={messages.AskStatus: lambda _: [messages.Status(text)]}) as hub:
        said = cocktail(command, hub.url)

    assert messages.AskStatus in hub.heard
    assert said.exit == 6, said.err
    assert "the hub is at fault: the hub's status cannot be read: " in said.err


@pytest.mark.parametrize("field", ["peers", "step", "losses", "eta_s", "parameters"])
@pytest.mark.parametrize("value", ["A\x1b]52;c;cm0gLXJm\x07", [[1]], {"line": 1}, -1e300, 2**120])
def test_a_figure_of_another_kind_is_the_hosts_fault(cocktail: Run, field: str, value: object) -> None:
    with lying_host(status={field: value}) as hub:
        said = cocktail("status", hub.url)

    assert messages.AskStatus in hub.heard
    assert said.exit == 6, said.err
    assert f"`$.{field}" in said.err


def test_a_hub_that_lacks_figures_and_has_others_is_read(cocktail: Run) -> None:
    """Such as one of a later version."""
    people = {"peers": [{"name": "ann", "gpu": "RTX", "state": "training"}], "since": "yesterday"}
    with lying_host(status=people) as hub:
        said = json.loads(cocktail("status", hub.url, "--json").out)
        shown = cocktail("status", hub.url, "--peers")

    assert (said["since"], said["eta_s"], said["peers"][0]["tokens"]) == ("yesterday", None, 0)
    assert "ann  RTX" in shown.out


# ---- words of the other side -------------------------------------------------------------------------------


def recipe_with(**words: str) -> str:
    """A recipe that a peer takes, with a stranger's words in its texts."""
    keys = json.loads(load_recipe("smoke").to_json())
    keys["description"] = words.get("description", WORDS)
    keys["model"]["model_name_or_path"] = words.get("model", f"org/{WORDS}")
    keys["datasets"] = [{"path": f"org/{number}{WORDS}"} for number in range(3)]
    text = json.dumps(keys)
    assert recipe_from_json(text).description == keys["description"], "it got as far as the question"
    return text


class Typed(io.StringIO):
    """Words that somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def check(said: Said, beginning: str, lines: int) -> None:
    """The text is safe, and of so many lines; none of them is a stranger's."""
    assert safe(said.out + said.err)
    assert "]52;c;cm0gLXJm" in said.err, "it was shown"
    assert [line for line in said.err.splitlines() if line.startswith(beginning)] != []
    assert said.err.count("\nerror: ") + said.err.startswith("error: ") == (beginning == "error: ")
    assert len(said.err.splitlines()) <= lines


@pytest.mark.parametrize(
    ("lies", "exit", "beginning"),
    [
        ({messages.Hello: lambda _: [messages.Refused("full", WORDS)]}, 6, "error: the hub refused: A"),
        ({messages.Hello: lambda _: [messages.Refused("over", WORDS)]}, 7, "error: "),
        (
            {messages.Hello: lambda _: [messages.Wait(WORDS), messages.Refused("approval", "no")]},
            6,
            "error: the hub refused: no",
        ),
        ({messages.Get: lambda m: [messages.NoObject(m.name, WORDS)]}, 6, "error: "),
        ({messages.Ready: lambda _: [messages.Over(WORDS, True)]}, 0, ""),
        ({messages.Ready: lambda _: [messages.Over(WORDS, False, True)]}, 75, ""),
    ],
    ids=["refused", "over before", "wait", "no object", "over", "paused"],
)
def test_a_hubs_words_are_words_on_the_terminal_of_a_volunteer(
    cocktail: Run, files: dict[str, bytes], lies: dict[type, Any], exit: int, beginning: str
) -> None:
    with lying_host(files, lies) as hub:
        said = cocktail("join", hub.url, "-y", "--device", "cpu", "--name", "ann")

    assert next(iter(lies)) in hub.heard, "it got as far as the lie"
    assert said.exit == exit
    assert beginning.removeprefix("error: ") in said.err
    check(said, beginning[:7], lines=30)


def test_a_runs_words_are_words_in_the_question(
    cocktail: Run, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Typed("n\n"))
    told = {"licence": WORDS, "reason": WORDS, "peers": [{"name": WORDS, "gpu": WORDS, "state": WORDS}]}
    with lying_host(files, status=told, recipe=recipe_with()) as hub:
        said = cocktail("join", hub.url, "--device", "cpu", "--name", "ann")

    assert messages.Deciding in hub.heard
    assert said.exit == 0
    assert "not joined: nothing was downloaded" in said.err
    check(said, "- licence", lines=60)
    labels = [line for line in said.err.splitlines() if line.startswith("- ")]
    assert [word for word in (label.split()[1] for label in labels) if word != "shows"] == [
        "trains",
        "licence",
        "on",
        "takes",
        "downloads",
        "uses",
        "never",
    ]


ROW = {"name": WORDS, "gpu": WORDS, "state": WORDS, "reason": WORDS}
STATUS = {
    "reason": WORDS,
    "state": WORDS,
    "peers": [ROW, ROW | {"name": "b" + WORDS}],
    "others": [ROW, ROW | {"state": "deciding"}],
    "stages": {"rings": [[{"name": WORDS, "layers": [0, 2]}]], "waiting": [WORDS]},
    "recipe_hash": WORDS,
}


@pytest.mark.parametrize("options", [(), ("--peers",), ("--json",), ("-q",), ("--watch", "-q")])
def test_a_status_is_words_on_a_terminal(cocktail: Run, options: tuple[str, ...]) -> None:
    over = {"state": "finished"} if "--watch" in options else {}
    with lying_host(status=STATUS | over) as hub:
        said = cocktail("status", hub.url, *options)

    assert said.exit == 0, said.err
    assert safe(said.out + said.err)
    assert not [line for line in said.out.splitlines() if line.startswith(("error:", "hint:"))]
    if "--json" in options:
        assert all(map(safe, texts_in(json.loads(said.out))))
        assert said.out.isascii()
    elif not options:
        table = [line for line in said.out.splitlines() if line.count("A?]52") == 3 or "PEER " in line]
        starts = [line.find("A?]52", line.find("A?]52") + 1) for line in table[1:]]
        assert starts == [table[0].index("HARDWARE")] * 3, "the columns stand below each other"


@pytest.mark.parametrize(
    "words",
    [("peers",), ("peers", "-q"), ("peers", "--json"), ("kick", "ann"), ("peers", "--approve", "ann")],
)
def test_what_a_hub_tells_its_host_is_words_on_a_terminal(
    cocktail: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A host's hub may be another's by now: `standby`, or a program that took its port."""
    figures = {"key": WORDS, "since_s": None, "strikes": 0, "up_bytes": 1, "down_bytes": 1}
    answer = {
        "join": "token",
        "peers": [ROW | figures] * 2,
        "more": "",
        "left": 0,
        "did": WORDS,
        "key": WORDS,
    }
    answer |= {"peers": [WORDS]} if len(words) > 1 and words[1] not in ("-q", "--json") else {}
    with lying_host(lies={messages.AskAdmin: lambda _: [messages.Status(json.dumps(answer))]}) as hub:
        url = parse_url(hub.url)
        save_run(replace(record(tmp_path / "out"), url=hub.url, bind="127.0.0.1", port=url.port))
        said = cocktail(words[0], "amber-otter-42", *words[1:])

    assert messages.AskAdmin in hub.heard
    assert said.exit == 0, said.err
    assert safe(said.out + said.err)
    assert "A?]52;c;" in said.out
    assert not [line for line in said.out.splitlines() if line.startswith(("error:", "hint:"))]
