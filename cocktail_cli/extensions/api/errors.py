"""The exceptions of the Python API: a `Failure` for each exit status of the commands."""

from __future__ import annotations

from cocktail_cli.errors import Failure


class InvalidInput(Failure):
    """An argument, the recipe, the data, the model or the run URL is wrong (exit 2 and 3)."""


class PreflightFailed(Failure):
    """This machine cannot do it: a device, a port or a folder is missing or in use (exit 4)."""


class Unreachable(Failure):
    """The hub of the run, or a server that has model or data, does not answer (exit 5)."""


class Rejected(Failure):
    """The hub refused: bad token, other version, run full, or `swarm.requires` is not met here (exit 6)."""


class NoResult(Failure):
    """The run ended without a model: no step was made, too few peers were left, or it diverged (exit 7)."""


class OutOfResources(Failure):
    """Memory or disk is full (exit 8)."""


class Altered(Failure):
    """A file, a ledger or a receipt is not what was written or signed (exit 9)."""


class ConnectionLost(Failure):
    """The connection to the hub is lost; joining again continues (exit 75)."""


FAMILY = {
    2: InvalidInput,
    3: InvalidInput,
    4: PreflightFailed,
    5: Unreachable,
    6: Rejected,
    7: NoResult,
    8: OutOfResources,
    9: Altered,
    75: ConnectionLost,
}


def public(failure: Failure) -> Failure:
    """Convert a command's failure to the exception of its exit status, with problems and hints as notes.

    Its text names the first problem, as not everybody who prints an exception prints its notes.
    """
    kind = FAMILY.get(failure.exit, Failure)
    error = kind(failure.code, failure.message, failure.problems, failure.hints)
    if failure.problems:
        first = failure.problems[0]
        place = " ".join(part for part in (first.place, first.key) if part)
        error.args = (": ".join(part for part in (failure.message, place, first.message) if part),)
    for line in list(failure.lines())[1:]:
        error.add_note(line)
    return error
