"""The command that adds a package to this installation, and the one that installs cocktail elsewhere.

Neither names `cocktail-sgd` on a package index, where the name may be anybody's: the first names third-party
packages, the second what this cocktail was installed from (direct_url.json of PEP 610). The project's own
address stands in pyproject.toml, as `[project.urls] Repository`, and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import url2pathname

DISTRIBUTION = "cocktail-sgd"


def command_to_add(*packages: str) -> str:
    """Return the command that installs third-party packages beside this cocktail, in versions that it works
    with: by pipx, pip or uv, whichever made its environment."""
    wanted = [requirement(package) for package in packages]
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return command("pipx", "inject", DISTRIBUTION, *wanted)
    if find_spec("pip") is not None:
        return command(sys.executable, "-m", "pip", "install", *wanted)
    return command("uv", "pip", "install", "--python", sys.prefix, *wanted)


def command_elsewhere() -> str | None:
    """Return the command that installs this cocktail on another machine, from where this one came.

    None where no public address is known: it came from a folder without a remote, and `Repository` is unset.
    """
    address = git_address()
    return None if address is None else command("uv", "tool", "install", f"git+{address}")


def requirement(package: str) -> str:
    """Return a package with the bounds that a dependency or an extra of ours states, if one does."""
    found = installed()
    for line in (found.requires or []) if found else []:
        wanted = line.partition(";")[0].strip()
        if re.split(r"[^\w.-]", wanted, maxsplit=1)[0].lower() == package.lower():
            return wanted
    return package


def git_address() -> str | None:
    """Return the https address that this cocktail can be cloned from, `@` its commit where that is known."""
    url = direct_url()
    if url.get("vcs_info", {}).get("vcs") == "git":
        return f"{without_password(url['url'])}@{url['vcs_info']['commit_id']}"
    remote = remote_of(folder_of(url))
    if remote.startswith("https://"):
        return without_password(remote)
    found = installed()
    urls = (found.metadata.get_all("Project-URL") or []) if found else []
    return dict(line.split(", ", 1) for line in urls).get("Repository")


def folder_of(url: dict[str, Any]) -> Path:
    """Return the folder that this cocktail was installed from, or that it runs in."""
    if "dir_info" in url:
        return Path(url2pathname(urlsplit(url["url"]).path))
    return Path(__file__).resolve().parent.parent


def remote_of(folder: Path) -> str:
    """Return the address of git's remote `origin`; "" where the folder is no checkout, or git is missing."""
    if not (folder / ".git").exists():
        return ""
    asked = ["git", "-C", str(folder), "config", "--get", "remote.origin.url"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def direct_url() -> dict[str, Any]:
    """Return direct_url.json of the installed distribution; {} where it came from an index, or is not
    installed."""
    found = installed()
    text = found.read_text("direct_url.json") if found else None
    return dict(json.loads(text)) if text else {}


def installed() -> Distribution | None:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:  # it runs from a checkout that was not installed
        return None


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def command(*words: str) -> str:
    """Join words to a line for this system's shell."""
    if os.name != "nt":
        return shlex.join(words)
    return " ".join(word if re.fullmatch(r"[\w@:./\\+-]+", word) else f'"{word}"' for word in words)
