"""Words of a command line before its command sees them: options named like keys, what is gone; config.toml.

`--learning-rate 1e-4`, as in TRL, becomes `learning_rate=1e-4` for commands that take KEY=VALUE arguments.
Options of the command itself stay what they are. Of commands, options and variables that are gone it is said
what does their work now.

config.toml has defaults for `join` and `launch` on this machine.

    name = "attic-3090"
    max-up = "5mbit"
    hours = "22:00-07:00"

A key is an option without its dashes. A typed option wins, then COCKTAIL_CACHE, then this file,
then the default. Settings that a run must share are in its recipe, never in a file of one machine.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import platformdirs
import typer

from .assembly import EXTENSIONS, NETWORK, SHOWING, options_of, recipe_type
from .errors import Failure
from .options import parse_rate, parse_size

REMOVED = {  # as it was typed after `cocktail` -> what to type now
    "bench": "scripts/bench_compress, scripts/bench_step, and of a line to a run cocktail doctor RUN_URL",
    "launch --resume": "cocktail resume RUN, or its folder",
    "launch --dry-run": "cocktail validate RECIPE and cocktail plan RECIPE",
} | {old: new for row in EXTENSIONS for old, new in row.removed.items()}
VARIABLES = {  # of the environment -> option; COCKTAIL_PORT is not here, as Kubernetes sets it by itself
    f"COCKTAIL_{name}": "--" + name.lower().replace("_", "-")
    for name in [
        *("ADVERTISE", "MAX_DOWN", "MAX_UP", "MICRO_BATCH_SIZE", "NAME", "PROGRESS", "YES"),
        *(option.parameter.upper() for _, option in options_of("launch") if option.panel == NETWORK),
    ]
}


def check_removed(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise Failure (usage), in one line, where a command was given something that is gone.

    A variable that is ignored in silence could be a limit that its user relies on.
    """
    given = [*arguments[: arguments.index("--")]] if "--" in arguments else [*arguments]
    options = {word.partition("=")[0].replace("_", "-") for word in given[1:] if word.startswith("--")}
    for old, new in REMOVED.items():
        command, _, option = old.partition(" ")
        if given[:1] == [command] and (not option or option in options):
            raise Failure("usage", f"cocktail {old} is gone; now it is {new}")
    for old, new in VARIABLES.items():
        if given[:1] and given[0] in SHOWING and environment.get(old):
            raise Failure("usage", f"{old} of the environment is gone; now it is {new}")


OPTIONS = {"datasets": "--data", "model.model_name_or_path": "--model"}  # keys that have an option as well
SAME = {"use_peft": "lora"}  # options of TRL that mean to the letter what a key of ours does
SWITCHED = {"true", "false", "auto", "null", "yes", "no", "on", "off"}  # values of a key that may be a switch


@dataclass
class KeyOptions:
    """Rewrites the arguments of one command."""

    own: dict[str, bool]  # its options -> True where a value follows
    rewritten: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, command: Any) -> KeyOptions:
        """Read the options of a Typer command."""
        own = {"--help": False, "-h": False}
        for parameter in command.params:
            takes = not (getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))
            for name in (*parameter.opts, *parameter.secondary_opts):
                if name.startswith("-"):
                    own[name] = takes
        return cls(own)

    def rewrite(self, arguments: list[str]) -> list[str]:
        """Return the arguments with keys as KEY=VALUE. Raises Failure (usage) for an unknown option."""
        left = list(arguments)
        while left:
            word = left.pop(0)
            if word == "--":
                self.rewritten += [word, *left]
                break
            if not word.startswith("--"):
                self.rewritten.append(word)
                if self.own.get(word) and left:
                    self.rewritten.append(left.pop(0))
                continue
            self._option(word, left)
        return self.rewritten

    def _option(self, word: str, left: list[str]) -> None:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        if dashed in self.own:
            self.rewritten.append(dashed + equals + value)
            if self.own[dashed] and not equals and left:
                self.rewritten.append(left.pop(0))
            return
        from recipes.config import is_switch, known_key

        key = name[2:].replace("-", "_")
        key = SAME.get(key, key)
        of = recipe_type(() if known_key(key) or is_switch(key.removeprefix("no_")) else None)
        if known_key(key, of):
            if not equals:
                value = switch_value(left) if is_switch(key, of) else value_of(name, left)
            self.rewritten.append(f"{key}={value}")
        elif key.startswith("no_") and is_switch(key[3:], of):
            self.rewritten.append(f"{key[3:]}=false")
        else:
            raise self._unknown(name, key)

    def _unknown(self, name: str, key: str) -> Failure:
        from recipes.config import foreign_keys, key_names

        if ours := foreign_keys(recipe_type()).get(key):
            return Failure(
                "usage", f"no such option: {name}", hints=(f"cocktail calls this {OPTIONS.get(ours, ours)}",)
            )
        known = [option for option in self.own if option.startswith("--")]
        known += [f"--{each.replace('_', '-')}" for each in key_names(recipe_type())]
        near = get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "the keys of a recipe: cocktail recipes schema"
        return Failure("usage", f"no such option: {name}", hints=(hint,))


def value_of(name: str, left: list[str]) -> str:
    """Take the value that follows an option; it may begin with a dash, as -1 does."""
    if not left or left[0].startswith("--"):
        raise Failure("usage", f"{name} needs a value", hints=(f"{name} VALUE, or {name}=VALUE",))
    return left.pop(0)


def switch_value(left: list[str]) -> str:
    """Take the value that follows a switch, if one does: `--packing` alone is true."""
    return left.pop(0).lower() if left and left[0].lower() in SWITCHED else "true"


def rewritten(arguments: list[str], root: Any) -> list[str]:
    """Rewrite a command line for the command that it names, if that takes KEY=VALUE arguments.

    Args:
        root: the Typer app as a command.

    Raises Failure (usage).
    """
    command, depth = root, 0
    while depth < len(arguments) and arguments[depth] in getattr(command, "commands", {}):
        command = command.commands[arguments[depth]]
        depth += 1
    if not any(parameter.name == "overrides" for parameter in command.params):
        return arguments
    return arguments[:depth] + KeyOptions.of(command).rewrite(arguments[depth:])


CONFIGURED = ("launch", "join")  # with such options
Kind = type | Callable[[str], object]  # type of a value, or its parser
SETTINGS: dict[str, Kind] = {
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
KEYS: dict[str, Kind] = SETTINGS | {
    option.name.lstrip("-"): option.reader(folder) if isinstance(option.kind, str) else option.kind
    for command in CONFIGURED
    for folder, option in options_of(command)
    if option.setting
}


def config_file() -> Path:
    """Return COCKTAIL_CONFIG, or the platform's path for settings."""
    wanted = os.environ.get("COCKTAIL_CONFIG")
    return Path(wanted).expanduser() if wanted else platformdirs.user_config_path("cocktail") / "config.toml"


def defaults() -> dict[str, dict[str, Any]]:
    """Return command -> parameter -> value; empty without a file. Raises Failure (usage), with the key."""
    path = config_file()
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Failure("usage", f"{path}: {error}") from error
    for key, value in settings.items():
        check_setting(path, key, value)
    given = {key.replace("-", "_"): value for key, value in settings.items()}
    return dict.fromkeys(CONFIGURED, given)


def check_setting(path: Path, key: str, value: object) -> None:
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
