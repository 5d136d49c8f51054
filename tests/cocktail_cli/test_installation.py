"""Commands in hints install into this environment, or from where this cocktail came; they name no package of
an index that is not ours."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cocktail_cli.errors import explain
from cocktail_cli.installation import command_elsewhere, command_to_add
from recipes.errors import MissingPackage

METADATA = """Metadata-Version: 2.4
Name: cocktail-sgd
Version: 9
Requires-Dist: torch>=2.6
Provides-Extra: bnb
Requires-Dist: bitsandbytes>=0.48; extra == "bnb"
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Write what an installer leaves of cocktail: METADATA, and direct_url.json."""

    def write(url: dict[str, Any] | None, more: str = "") -> None:
        folder = tmp_path / "site" / "cocktail_sgd-9.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA + more, encoding="utf-8")
        if url:
            (folder / "direct_url.json").write_text(json.dumps(url), encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder.parent))

    return write


def test_a_package_is_added_by_what_made_the_environment(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(None)

    monkeypatch.setattr("cocktail_cli.installation.find_spec", lambda name: name)  # pip is there
    by_pip = shlex.split(command_to_add("bitsandbytes"))
    assert by_pip == [sys.executable, "-m", "pip", "install", "bitsandbytes>=0.48"]

    monkeypatch.setattr("cocktail_cli.installation.find_spec", lambda name: None)  # uv makes no pip
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    by_uv = shlex.split(command_to_add("bitsandbytes", "wandb"))
    assert by_uv == ["uv", "pip", "install", "--python", str(tmp_path), "bitsandbytes>=0.48", "wandb"]

    (tmp_path / "pipx_metadata.json").touch()
    assert command_to_add("torch") == "pipx inject cocktail-sgd 'torch>=2.6'"


def test_a_missing_package_is_told_with_the_command_that_adds_it(install: Install) -> None:
    install(None)

    failure = explain(MissingPackage("8 bits need it", "bitsandbytes", hints=("or 32",)))

    assert failure.code == "model_invalid"
    assert failure.hints == (command_to_add("bitsandbytes"), "or 32")


def test_another_machine_installs_from_the_commit_that_this_one_has(install: Install) -> None:
    vcs = {"vcs": "git", "commit_id": "abc123", "requested_revision": "main"}
    install({"url": "https://me:secret@example.org/cocktail.git", "vcs_info": vcs})

    assert command_elsewhere() == "uv tool install git+https://example.org/cocktail.git@abc123"


def test_another_machine_installs_from_the_remote_of_the_folder_that_this_one_has(
    install: Install, tmp_path: Path
) -> None:
    folder = tmp_path / "a clone"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    remote = ["remote", "add", "origin", "https://me:secret@example.org/cocktail.git"]
    subprocess.run(["git", "-C", str(folder), *remote], check=True)
    install({"url": folder.as_uri(), "dir_info": {}})

    assert command_elsewhere() == "uv tool install git+https://example.org/cocktail.git"


@pytest.mark.parametrize(
    ("more", "address"),
    [
        ("", None),
        (
            "Project-URL: Paper, https://example.org/p\nProject-URL: Repository, https://example.org/c\n",
            "https://example.org/c",
        ),
    ],
    ids=["without an address", "with the project's own"],
)
def test_a_folder_without_a_remote_is_installed_elsewhere_from_the_projects_own_address_if_it_has_one(
    install: Install, tmp_path: Path, more: str, address: str | None
) -> None:
    install({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}, more)

    assert command_elsewhere() == (f"uv tool install git+{address}" if address else None)
