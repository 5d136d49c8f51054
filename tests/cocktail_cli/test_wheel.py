"""The package as users get it: not the checkout, but the source distribution, and the wheel built from it."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from cocktail_cli import __version__

ROOMS = ("cocktail_cli", "compress", "recipes", "transport")
FOLDERS = (*ROOMS, "scripts", "tests", ".ci", ".github")
FILES = ("LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "pyproject.toml", "constraints.txt")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
BRINGS = {  # module -> package of another name
    "backports": "backports.zstd",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
LATER = {"compression"}  # in the standard library from Python 3.14 on
OPTIONAL = {"triton"}  # of torch's builds for Linux


def built(what: str, source: Path, to: Path) -> Path:
    to.mkdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(to)], cwd=source, check=True, capture_output=True
    )
    (file,) = to.iterdir()
    return file


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_source_distribution_is_whole_and_builds_the_wheel_that_the_checkout_builds(
    root: Path, tmp_path: Path
) -> None:
    """Built from a copy: setuptools leaves its traces where it builds."""
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(root / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(root / file, source)
    files = files_of(source)
    with tarfile.open(built("sdist", source, tmp_path / "sdist")) as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    assert files - files_of(unpacked) == set()
    wheels = [built("wheel", folder, tmp_path / f"from-{folder.name}") for folder in (source, unpacked)]
    with zipfile.ZipFile(wheels[0]) as one, zipfile.ZipFile(wheels[1]) as other:
        assert [(i.filename, i.CRC) for i in one.infolist()] == [
            (i.filename, i.CRC) for i in other.infolist()
        ]
        names = set(one.namelist())
        metadata = one.read(f"cocktail_sgd-{__version__}.dist-info/METADATA").decode()

    shipped = {file for file in files if file.startswith(ROOMS) and not file.endswith((".md", ".jsonl"))}
    pictures = {file for file in shipped if re.search(r"/(quality-|terminal)[^/]*\.svg$", file)}
    assert shipped - pictures - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(ROOMS)
    assert f"cocktail_sgd-{__version__}.dist-info/licenses/LICENSE" in names
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_every_package_that_a_room_imports_is_a_declared_dependency(
    root: Path,
) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {named(line) for line in project["dependencies"]}
    extras = {named(line) for lines in project["optional-dependencies"].values() for line in lines}

    imported = imported_in(root)

    assert imported - declared <= extras | OPTIONAL


def imported_in(root: Path) -> set[str]:
    """Name the packages that product files import."""
    modules = {module for room in ROOMS for path in (root / room).rglob("*.py") for module in imports(path)}
    modules -= sys.stdlib_module_names | LATER | set(ROOMS)
    return {plain(BRINGS.get(module, module)) for module in modules}


def imports(path: Path) -> set[str]:
    """Top-level modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def named(requirement: str) -> str:
    return plain(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_readme_names_the_address_that_the_project_has(root: Path) -> None:
    """Set once, in pyproject.toml; until then README says REPOSITORY where the address will stand."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (root / "README.md").read_text(encoding="utf-8")

    clones = set(re.findall(r"git clone (\S+)", readme))

    assert clones == {project["urls"].get("Repository", "REPOSITORY")}
