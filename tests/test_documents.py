"""Documents are short, name what is there, and fit a screen."""

import ast
import re
from pathlib import Path

import pytest
from house import ROOMS, ROOT

from cocktail_cli.assembly import EXTENSIONS

RECORDS = ("LOG.md", "RESULTS.md")  # dated figures, written once
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "*/*.md", "*/*/*.md", "*/*/*/*.md")
    for path in ROOT.glob(pattern)
    if path.relative_to(ROOT).parts[0] in (*ROOMS, "scripts", "README.md")
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> list[str]:
    """Lines of a document outside code blocks and tables."""
    lines, code = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        code ^= line.startswith("```")
        if not code and not line.startswith("|"):
            lines.append(line)
    return lines


def section(room: str, title: str) -> str:
    text = (ROOT / room / "README.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_readme_is_read_in_minutes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert len(text.splitlines()) <= 150
    assert len(text.split()) < 2000


@pytest.mark.parametrize("room", [*ROOMS, "scripts"])
def test_a_rooms_readme_has_at_most_200_lines(room: str) -> None:
    assert len((ROOT / room / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if p.name not in RECORDS], ids=name)
def test_no_line_is_wider_than_120_columns(path: Path) -> None:
    assert [line for line in prose(path) if len(line) > 120] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_to_files_of_the_project(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", "\n".join(path.read_text(encoding="utf-8").splitlines()))
    local = [link for link in links if "://" not in link]
    pages = {row.folder for row in EXTENSIONS}
    gone = [link for link in local if not (path.parent / link).exists()]

    assert [
        link for link in gone if not ("extensions/" in link and Path(link).parent.name not in pages)
    ] == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_map_of_a_room_names_each_of_its_modules(room: str) -> None:
    named = set(re.findall(r"[a-z_0-9]+", section(room, "Map")))
    paths = [path for path in (ROOT / room).rglob("*.py") if not path.stem.startswith("__")]
    of_extensions = {path for path in paths if "extensions" in path.parent.parent.parts}

    assert sorted({path.stem for path in paths if path not in of_extensions} - named) == []
    for path in of_extensions:
        page = section("/".join(path.relative_to(ROOT).parts[:3]), "Map")
        assert re.search(rf"\b{path.stem}\b", page), path


@pytest.mark.parametrize("room", ROOMS)
def test_the_walk_of_a_delta_names_functions_that_exist(room: str) -> None:
    steps = re.findall(
        r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", section(room, "Walk of a delta"), re.MULTILINE
    )

    assert steps
    for file, function in steps:
        found: list[ast.AST] = [ast.parse((ROOT / room / file).read_text(encoding="utf-8"))]
        for part in function.split("."):
            found = [
                node
                for node in ast.walk(found[0])
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ]
            assert found, f"{file}: {function}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_rooms_readme_names_files_that_exist(room: str) -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / room / "README.md").read_text(encoding="utf-8"))

    assert [file for file in named if not (ROOT / room / file).exists() and not (ROOT / file).exists()] == []
