"""Commands, options and variables that are gone, and what does their work now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .assembly import EXTENSIONS, NETWORK, SHOWING, options_of
from .errors import Failure

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
