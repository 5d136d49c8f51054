"""Every error text of the tool, read from the code: `test_words.py` compares it with cocktail_cli/ERRORS.md.

python tests/words.py      prints what the file lacks, as lines to fill in, and what it has too much
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "cocktail_cli" / "ERRORS.md"
# What a user may read: the class that is made, and which of its arguments is the text.
TEXT = {
    "cocktail_cli": {"Failure": 1, "BadParameter": 0, "NotGenuine": 0},
    "recipes": {
        "DataError": 0,
        "ForeignSamples": 0,
        "ForeignPacket": 0,
        "ModelError": 0,
        "MissingPackage": 0,
        "Refused": 0,  # either of the two
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
        "NotGenuine": 0,
        "LedgerError": 0,
        "LedgerBusy": 0,
        "LedgerDamaged": 0,
    },
}
TOLD_BY_PYDANTIC = ("schema.py", "document.py")  # what is wrong with a value becomes a Problem with its line


def said() -> Iterator[tuple[str, str]]:
    """(room, text) of every error that the code makes; what is put in at run time as `{name}`."""
    for room, classes in TEXT.items():
        for path in sorted((ROOT / room).rglob("*.py")):
            read = classes | ({"ValueError": 0} if path.name in TOLD_BY_PYDANTIC else {})
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and (text := text_of(node, read)) is not None:
                    yield room, text


def text_of(call: ast.Call, classes: dict[str, int]) -> str | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    place = classes.get(name)
    if place is None:
        return None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "message"]
    found = call.args[place] if len(call.args) > place else (named or [None])[0]
    return plain(found) if found is not None else None


def plain(node: ast.expr) -> str | None:
    """A literal or an f-string as one reads it; None where the text is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = plain(node.left), plain(node.right)
        return None if left is None and right is None else f"{left or '{…}'}{right or '{…}'}"
    if isinstance(node, ast.JoinedStr):
        text = "".join(hole(part) for part in node.values)
        return text if re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", text)) else None
    return None


def hole(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        names = [
            n.id if isinstance(n, ast.Name) else n.attr
            for n in ast.walk(part.value)
            if isinstance(n, ast.Name | ast.Attribute)
        ]
        return "{" + (names[0] if names else "…") + "}"
    assert isinstance(part, ast.Constant)
    return str(part.value)


def listed() -> dict[tuple[str, str], tuple[str, str]]:
    """(room, text) -> (cause, what to do), as the golden file has it."""
    found, room = {}, ""
    rooms = iter(TEXT)
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            room = next(rooms)
        elif line.startswith("| `` "):
            text, cause, todo = (cell.replace("\\|", "|") for cell in re.split(r" (?<!\\)\| ", line[2:-2]))
            found[room, text.removeprefix("`` ").removesuffix(" ``")] = (cause, todo)
    return found


if __name__ == "__main__":
    there, golden = set(said()), listed()
    for room, text in sorted(there - golden.keys()):
        print(f"{room} lacks:  | `` {text} `` | cause | what to do |")
    for room, text in sorted(golden.keys() - there):
        print(f"{room} has no longer:  {text}")
