"""Defaults for `join` and `launch` on this machine: config.toml.

    name = "attic-3090"
    max-up = "5mbit"
    hours = "22:00-07:00"

A key is an option without its dashes. A typed option wins, then COCKTAIL_CACHE, then this file,
then the default. Settings that a run must share are in its recipe, never in a file of one machine.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import platformdirs
import typer

from cocktail_cli.assembly import options_of
from cocktail_cli.machine import parse_rate, parse_size

from .errors import Failure

COMMANDS = ("launch", "join")  # with such options
Kind = type | Callable[[str], object]  # type of a value, or its parser
OWN: dict[str, Kind] = {
    "cache-dir": str,
    "device": str,
    "max-disk": parse_size,
    "max-down": parse_rate,
    "max-up": parse_rate,
    "micro-batch-size": int,
    "name": str,
    "progress": str,
    "vram-limit": parse_size,
}
KEYS: dict[str, Kind] = OWN | {
    option.name.lstrip("-"): option.reader(folder) if isinstance(option.kind, str) else option.kind
    for command in COMMANDS
    for folder, option in options_of(command)
    if option.setting
}


def place() -> Path:
    """Return COCKTAIL_CONFIG, or the platform's path for settings."""
    wanted = os.environ.get("COCKTAIL_CONFIG")
    return Path(wanted).expanduser() if wanted else platformdirs.user_config_path("cocktail") / "config.toml"


def defaults() -> dict[str, dict[str, Any]]:
    """Return command -> parameter -> value; empty without a file. Raises Failure (usage), with the key."""
    path = place()
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Failure("usage", f"{path}: {error}") from error
    for key, value in settings.items():
        check(path, key, value)
    given = {key.replace("-", "_"): value for key, value in settings.items()}
    return dict.fromkeys(COMMANDS, given)


def check(path: Path, key: str, value: object) -> None:
    """Check a key and its value. Raises Failure (usage)."""
    if key not in KEYS:
        close = get_close_matches(key, KEYS, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(KEYS)}"
        raise Failure("usage", f"{path}: no such setting: {key}", hints=(hint,))
    wanted = KEYS[key]
    if isinstance(wanted, type):
        if type(value) is not wanted:
            raise Failure("usage", f"{path}: {key} is {value!r}, expected {wanted.__name__}")
        return
    try:
        wanted(str(value))
    except (ValueError, typer.BadParameter) as error:
        raise Failure("usage", f"{path}: {key}: {error}") from error
