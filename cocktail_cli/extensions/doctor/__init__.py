"""The command `cocktail doctor`: whether this machine can train, host a run, and join one."""

from collections.abc import Sequence

from cocktail_cli.assembly import Command, Extension
from cocktail_cli.options import CHECK


class Doctor(Extension):
    """The command alone: no run uses it."""

    @property
    def commands(self) -> Sequence[Command]:
        from .command import doctor

        return (Command("doctor", CHECK, doctor),)


extension = Doctor()
