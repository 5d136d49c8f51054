"""Words of errors: each says what to do about it, in plain words."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from house import ROOT

from cocktail_cli.errors import CODES, EXIT, explain

# What a user may read: the class that is made, and which of its arguments is the text.
TEXT = {
    "cocktail_cli": {"Failure": 1, "BadParameter": 0, "NotGenuine": 0},
    "recipes": {
        "DataError": 0,
        "ForeignSamples": 0,
        "ForeignPacket": 0,
        "ModelError": 0,
        "MissingPackage": 0,
        "Refused": 0,  # DataError or ModelError
        "HubUnreachable": 0,
        "Problem": 3,
        "MemoryFull": 0,
        "StageLost": 0,
        "DownloadError": 0,
    },
    "transport": {
        "UrlError": 0,
        "AddressInUse": 2,
        "Unreachable": 3,
        "Refused": 1,
        "refuse": 2,
        "RefusedByHub": 1,
        "LinkLost": 0,
        "NotServed": 0,
        "TooLong": 0,
        "NoRoom": 0,
        "LedgerError": 0,
        "LedgerBusy": 0,
        "LedgerDamaged": 0,
    },
}
PYDANTIC = ("schema.py", "document.py")  # there a ValueError becomes a Problem with its line
# How a message without a hint says what to type: `{error}` at its end is the text of a parser that says so.
SAYS_IT = re.compile(
    r"expected |; write |; at least |; give |; leave |one of .* at a time|go together|at most |cocktail "
    r"|; now it is |a port from 1 to|^--[a-z-]+: \{error\}$|needs the standby's folder"
)


class Told(NamedTuple):
    """An error that the code makes."""

    place: str
    kind: str
    text: str  # what is inserted at run time is `{name}`
    hinted: bool  # hints or problems are given


def errors_of(room: str) -> Iterator[Told]:
    for path in sorted((ROOT / room).rglob("*.py")):
        classes = TEXT[room] | ({"ValueError": 0} if path.name in PYDANTIC else {})
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in classes:
                continue
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            given = [*node.args[classes[name] :], named.get("message")][0]
            if given is not None and (text := plain(given)) is not None:
                hinted = len(node.args) > classes[name] + 1 or bool(
                    {"hints", "hint", "problems"} & named.keys()
                )
                yield Told(f"{path.relative_to(ROOT)}:{node.lineno}", name, text, hinted)


def plain(node: ast.expr) -> str | None:
    """Return a literal or an f-string as one reads it; None where the text is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        text = "".join(hole(part) for part in node.values)
        return text if re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", text)) else None
    return None


def hole(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        names = [n for n in ast.walk(part.value) if isinstance(n, ast.Name | ast.Attribute)]
        return "{" + (ast.unparse(names[0]) if names else "…") + "}"
    assert isinstance(part, ast.Constant)
    return str(part.value)


def test_a_failure_of_a_command_has_a_hint_or_says_what_is_expected() -> None:
    silent = [told for told in errors_of("cocktail_cli") if told.kind != "NotGenuine" and not told.hinted]

    assert [told for told in silent if not SAYS_IT.search(told.text)] == []


@pytest.mark.parametrize("name", CODES)
def test_an_error_of_a_room_that_gives_no_hint_gets_the_one_of_its_class(name: str) -> None:
    room, kind = name.rsplit(".", 1)
    error = type(kind, (Exception,), {"__module__": room})("a text")

    failure = explain(error)

    assert failure.code == CODES[name]
    assert failure.hints
    assert all(failure.hints)


def test_the_table_of_error_codes_is_the_one_of_the_code() -> None:
    text = (ROOT / "cocktail_cli" / "INTERFACES.md").read_text(encoding="utf-8")

    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| [^|]+ \|$", text, re.MULTILINE)

    assert {code: int(exit) for code, exit in rows} == EXIT


@pytest.mark.parametrize("room", TEXT)
def test_an_error_is_one_clause_without_shouting_or_a_full_stop(room: str) -> None:
    texts = [told.text for told in errors_of(room)]
    shouting = ("invalid", "illegal", "failed to", "unable to", "please", "oops")

    assert texts
    assert [text for text in texts if text.endswith((".", "!")) and not text.endswith(("...", " ."))] == []
    assert [text for text in texts if "\n" in text or "  " in text] == []
    assert [text for text in texts if any(word in text.lower() for word in shouting)] == []
