"""Product files, which of them belong to one capability, and their lines with code: for tests of layout."""

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("compress", "transport", "recipes", "cocktail_cli")
EXTENSIONS = (  # packages of one capability; all others are the heart
    "cocktail_cli/extensions",
    "recipes/planning",
    "transport/direct",  # of those whose peers dial each other
)
NO_CODE = {
    getattr(tokenize, name)
    for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
}


def is_extension(name: str) -> bool:
    """Tell whether a file or package, named from the root, belongs to one capability."""
    return f"{name}/".startswith(tuple(f"{one}/" for one in EXTENSIONS))


def files(room: str, *endings: str) -> Iterator[Path]:
    """Find the files of a folder at the root by their endings."""
    for path in sorted((ROOT / room).rglob("*")):
        if path.suffix in endings and "__pycache__" not in path.parts:
            yield path


@cache
def code_lines(path: Path) -> int:
    """Count the lines of a Python file that have code: no blank ones, comments, docstrings."""
    text = path.read_text(encoding="utf-8")
    found = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(found)
