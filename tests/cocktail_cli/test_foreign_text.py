"""Text of others is safe to show: no control, nothing invisible, one line; honest text stays what it is."""

# ruff: noqa: RUF001 - letters of many scripts are what it is about

import ast
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cocktail_cli.foreign_text import INVISIBLE, LONGEST, one_line, paragraphs, readable

# what no text may bring to a terminal: category of a character, and those invisible ones that have another
FORBIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
HOSTILE = some.text(
    some.characters()
    | some.sampled_from(
        "\x1b\x9b\x07\n\r\x85\u2028\u2029\u202e\u2066\u200b\u200d\ufeff\u00ad\U000e0041\ufe0f\u0301\ud800"
    )
)


def is_safe(text: str) -> bool:
    return not any(unicodedata.category(c) in FORBIDDEN or ord(c) in INVISIBLE for c in text)


def test_every_character_there_is_comes_out_safe() -> None:
    shown = [one_line(f"a{chr(code)}b") for code in range(sys.maxunicode + 1)]

    assert [hex(code) for code, text in enumerate(shown) if not is_safe(text)] == []
    assert all(text[0] == "a" and text[-1] == "b" for text in shown)


@given(HOSTILE)
def test_a_text_is_one_safe_line_and_stays_it(text: str) -> None:
    line = one_line(text)

    assert is_safe(line)
    assert len(line.splitlines()) <= 1
    assert one_line(line) == line
    assert len(line) <= min(len(text), LONGEST)


@given(HOSTILE)
def test_paragraphs_keep_their_line_feeds_and_tabs_alone(text: str) -> None:
    said = paragraphs(text)

    assert is_safe(said.replace("\n", "").replace("\t", ""))
    assert said.count("\n") == text.count("\n")
    assert paragraphs(said) == said


@pytest.mark.parametrize(
    "text",
    [
        "Grüße aus Köln: 100 €, déjà vu – „naïve“ … ½ ✓",
        "你好，世界 日本語 한국어",
        "مرحبا بالعالم",
        "שלום עולם",
        "नमस्ते दुनिया",
        "สวัสดี",
        "Ελληνικά Кириллица Հայերեն ქართული",
        "தமிழ் བོད་",
        "e\u0301 n\u0303",
        "🚀 😀 🇪🇺 👍🏽",
        "[red]x[/red] %s {0} \\n $(rm) `id`",
    ],
)
def test_honest_text_of_any_script_is_not_touched(text: str) -> None:
    assert one_line(text) == text
    assert paragraphs(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("A\x1b]52;c;cm0gLXJm\x07B", "A?]52;c;cm0gLXJm?B"),
        ("A\x1b[2JB\x9b31mC\x7f", "A?[2JB?31mC?"),
        ("ok\nerror: it failed\r\nhint: run this", "ok error: it failed  hint: run this"),
        ("ok\u2028error:\u2029x\x85y\x0bz\x0cw", "ok error: x y z w"),
        ("user\u202efdp.exe\u2066\u2069", "userfdp.exe"),
        ("al\u200bi\u200cc\u2060e\ufeff\u00ad\u034f", "alice"),
        ("al\U000e0041\U000e007fice\ufe0f\U000e0100", "alice"),
        ("a\u3000b\u00a0c\u2003d\u2800e", "a b c d e"),
        ("z" + "\u0300" * 50 + "y", "z" + "\u0300" * 3 + "y"),
        ("\u0300\u0301x", "x"),
        ("half \ud83d of it, \ue000, \ufffe", "half ? of it, ?, ?"),
        ("👨\u200d👩\u200d👧 ❤\ufe0f 1\ufe0f\u20e3 می\u200cخواهم", "👨👩👧 ❤ 1\u20e3 میخواهم"),
    ],
)
def test_what_commands_or_hides_is_replaced_or_dropped(text: str, shown: str) -> None:
    """Joined emoji become their parts, and Persian loses a joiner: both can be read."""
    assert one_line(text) == shown


def test_a_long_text_is_cut_and_says_so() -> None:
    assert one_line("x" * 5000) == "x" * (LONGEST - 1) + "…"
    assert one_line("x" * 50, 10) == "x" * 9 + "…"


def test_every_text_in_a_value_of_json_is_made_safe_and_nothing_else() -> None:
    value = {"a\x1b": [1, 2.5, None, True, ("b\n",), {"c": "\u202ed"}], "e": {}}

    assert readable(value) == {"a?": [1, 2.5, None, True, ("b ",), {"c": "d"}], "e": {}}


# ---- nobody can forget it ----------------------------------------------------------------------------------

ROOM = Path(__file__).resolve().parents[2] / "cocktail_cli"
WRITERS = {
    "ui/output.py",
    "extensions/board/live_view.py",  # a table that redraws itself; its texts pass through one_line
    "host/run_folder.py",  # records of the log, which its formatter makes lines of
    "main.py",  # the traceback of -v, through the guarded stream
    "extensions/multi_gpu/gpu_process.py",  # JSON to the process that started it
}


def there(names: set[str]) -> set[str]:
    """Return those that the project has: it may be without an extension."""
    return {name for name in names if (ROOM / name).exists()}


def writes(path: Path) -> Iterator[str]:
    """Places in a module that write to a stream by themselves."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in ("print", "typer.echo", "typer.secho", "click.echo") or called.endswith(
            ("stdout.write", "stderr.write", "console.print", "traceback.print_exc")
        ):
            yield f"{path.relative_to(ROOM).as_posix()}:{node.lineno} {called}"


def test_one_module_writes_what_people_read() -> None:
    """Another that prints by itself could print what a stranger wrote."""
    found = [place for path in sorted(ROOM.rglob("*.py")) for place in writes(path)]

    assert {place.partition(":")[0] for place in found} == there(WRITERS)


def test_nothing_else_decides_what_may_be_shown() -> None:
    """`isprintable` in other modules checks names of this machine."""
    found = {
        path.relative_to(ROOM).as_posix()
        for path in ROOM.rglob("*.py")
        if "isprintable" in path.read_text(encoding="utf-8")
    }

    own = {"extensions/reach/proxies.py", "machine/network_address.py", "volunteer/checkpoint_store.py"}
    assert found == {"foreign_text.py"} | there(own)
