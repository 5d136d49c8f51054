"""Hostile text in every field of every event and error, through every view: no terminal obeys any of it."""

import dataclasses
import importlib
import inspect
import io
import json
import os
import pkgutil
import pty
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hostile_words import HOSTILE, safe, texts_in

import cocktail_cli
import compress
import recipes
import transport
from cocktail_cli.assembly import events_of_extensions, open_screen
from cocktail_cli.errors import Failure, explain
from cocktail_cli.host import log_to, run_folder
from cocktail_cli.ui import View, events, guarded_output, say
from cocktail_cli.ui.display import JsonView, PlainView, QuietView
from cocktail_cli.ui.output import GuardedStream

LIES = ("error: ", "hint: ")
# what our own views send to a terminal beside text: cursor up, erase the line, return, colours
OURS = re.compile(r"\x1b\[(?:1A|2K|[0-9;]*m|\?25[lh])|\r")


def lines_that_lie(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(LIES)]


def hostile(kind: Any) -> Any:
    """A value of a type, with hostile text wherever text may be."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return hostile(next(one for one in inner if one is not type(None)))
    if origin is list:
        return [hostile(inner[0])]
    if origin is dict:
        return {hostile(inner[0]): hostile(inner[1])}
    given: dict[Any, Any] = {str: HOSTILE, Any: HOSTILE, int: 3, float: 0.5, bool: False}
    return given[kind]


def hostile_event(kind: type[Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: hostile(hints[field.name]) for field in dataclasses.fields(kind)})


KINDS = [kind for kind in events.Event.__subclasses__() if kind is not events.OfExtension]
KINDS += events_of_extensions().values()
EVENTS = [hostile_event(kind) for kind in KINDS]
BY_NAME = pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)


def shown(view: View, *streams: io.StringIO, event: Any) -> str:
    view.show(event)
    view.close()
    return "".join(stream.getvalue() for stream in streams)


@BY_NAME
def test_an_event_cannot_be_made_with_text_that_a_terminal_obeys(event: Any) -> None:
    """So no view, no program that reads --json, and no notebook is given any."""
    told = json.loads(events.as_json(event))
    again = events.from_json(told)
    texts = [text for name, value in told.items() if name not in events.OWN for text in texts_in(value)]

    assert all(map(safe, texts))
    assert all("\n" not in text for text in texts) or getattr(event, "texts", ())
    assert again == event


@BY_NAME
@pytest.mark.parametrize("verbose", [0, 1])
def test_in_a_log_each_event_is_still_one_line(event: Any, verbose: int) -> None:
    out, err = io.StringIO(), io.StringIO()
    said = shown(PlainView(out, err, verbose=verbose), out, err, event=event)

    assert safe(said)
    assert lines_that_lie(said) == []
    if not isinstance(event, events.RunStarted | events.RunFinished):
        assert said.count("\n") <= 1


@BY_NAME
def test_quiet_output_and_json_have_one_line_for_an_event(event: Any) -> None:
    out, err = io.StringIO(), io.StringIO()
    quiet = shown(QuietView(out, err), out, err, event=event)
    out = io.StringIO()
    as_json = shown(JsonView(out), out, event=event)

    assert safe(quiet)
    assert quiet.count("\n") <= 1
    assert as_json.isascii()
    assert as_json.rstrip("\n").isprintable()


@BY_NAME
def test_what_is_recorded_is_ascii_and_a_line_of_the_log(event: Any, tmp_path: Path) -> None:
    log_to(tmp_path / run_folder.LOG, 0)
    recorder = run_folder.Recorder(tmp_path)
    if not isinstance(event, events.RunStarted):  # whose ledger is read
        recorder.show(event)
    recorder.close()
    log_to(None, 0)

    log = (tmp_path / run_folder.LOG).read_text(encoding="utf-8")
    assert safe(log)
    assert log.count("\n") <= 1
    for name in ("events.jsonl", "metrics.jsonl"):
        assert (tmp_path / name).read_text(encoding="utf-8").isascii()


@BY_NAME
def test_on_a_terminal_a_screen_sends_text_and_its_own_movements_alone(
    event: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("TERM", "xterm"), ("COLUMNS", "100"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8", errors="replace") as terminal:
        view = open_screen(terminal, terminal, color=True)
        if view is None:
            pytest.skip("no extension draws")
        view.show(events.Joined("amber-otter-42", "ann", "smoke", "9f", 0))
        view.show(event)
        view.watch(STATUS)
        print(HOSTILE.replace("\n", ""), file=sys.stderr)  # a library, while the table stands
        view.close()
        terminal.flush()
        os.set_blocking(master, False)
        sent = read_all(master)
    os.close(master)

    assert "amber-otter-42" in sent
    assert safe(OURS.sub("", sent))
    assert lines_that_lie(OURS.sub("", sent)) == []


def read_all(file: int) -> str:
    data = b""
    while True:
        try:
            data += os.read(file, 65536)
        except BlockingIOError:
            return data.decode("utf-8", "replace")


PEER = {"name": HOSTILE, "gpu": HOSTILE, "state": HOSTILE, "share": 0.5, "tokens": 3, "rtt_ms": 1.0}
PEER |= {"up_bytes": 3, "down_bytes": 3, "last_seen_s": 1.0}
STATUS = {"run": HOSTILE, "state": HOSTILE, "peers": [PEER], "others": [PEER | {"name": HOSTILE * 2}]}


# ---- errors ------------------------------------------------------------------------------------------------


def exceptions() -> Iterator[type[BaseException]]:
    """Every exception class of the four rooms."""
    for room in (cocktail_cli, compress, recipes, transport):
        for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if module.name.endswith("__main__") or ".triton" in module.name:
                continue
            for found in vars(importlib.import_module(module.name)).values():
                if (
                    isinstance(found, type)
                    and issubclass(found, Exception)
                    and found.__module__ == module.name
                ):
                    yield found


def hostile_error(kind: type[BaseException]) -> BaseException:
    if issubclass(kind, Failure) and (kind is Failure or "__init__" not in vars(kind)):
        problem = recipes.errors.Problem(HOSTILE, 3, HOSTILE, HOSTILE, HOSTILE)
        return kind("rejected", HOSTILE, (problem, problem), (HOSTILE,))
    if kind.__name__ == "RecipeError":
        return kind([recipes.errors.Problem(HOSTILE, 3, HOSTILE, HOSTILE, HOSTILE)] * 2, HOSTILE)
    if "__init__" not in vars(kind):
        return kind(HOSTILE)
    wanted = [p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    given = {
        "int": 3,
        "bool": False,
        "bool | None": None,
        "tuple[str, ...]": (HOSTILE,),
        "Path": Path(HOSTILE[:9]),
    }
    try:
        return kind(*(given.get(str(p.annotation), HOSTILE) for p in wanted))
    except (AttributeError, TypeError):  # it is made of an object that has its words
        made = kind.__new__(kind)
        BaseException.__init__(made, HOSTILE)
        return made


def test_every_error_is_told_in_lines_of_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = sorted(exceptions(), key=lambda kind: (kind.__module__, kind.__name__))
    assert len(kinds) >= 40
    for kind in kinds:
        failure = explain(hostile_error(kind))
        with guarded_output():
            say(*failure.lines(), err=True)
        said, told = capsys.readouterr().err, failure.as_json()

        assert safe(said), kind
        assert said.count("\n") == 1 + len(failure.problems) + len(failure.hints), kind
        assert said.startswith("error: "), kind
        assert said.count("\nerror: ") == 0, kind
        assert said.count("\nhint: ") == len(failure.hints), kind
        assert told.isascii(), kind
        assert all(map(safe, texts_in(json.loads(told)))), kind


def test_an_error_of_a_megabyte_is_a_line_of_two_thousand_characters() -> None:
    assert len(explain(transport.protocol.RefusedByHub("full", "x" * 10**6)).message) == 2000


@pytest.mark.parametrize("words", ["No space left on device", "std::bad_alloc", "Cannot allocate memory"])
def test_a_hubs_words_do_not_decide_what_an_error_means(words: str) -> None:
    """A refusal is a refusal, also one that speaks of this machine's disk."""
    failure = explain(transport.protocol.RefusedByHub("full", words))

    assert (failure.code, failure.message) == ("rejected", f"the hub refused: {words}")


# ---- the streams -------------------------------------------------------------------------------------------


def test_what_a_library_or_a_traceback_writes_passes_the_guard(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_output():
        assert isinstance(sys.stdout, GuardedStream)
        sys.stdout.write(HOSTILE + "\n")
        print("a\tb\nc", file=sys.stderr)
        say(HOSTILE, HOSTILE)
    assert not isinstance(sys.stdout, GuardedStream)
    said = capsys.readouterr()

    assert safe(said.out)
    assert said.out.count("\n") == 2 + 2, "a library's line feed is its own, that of a line is none"
    assert said.err == "a\tb\nc\n"
