"""The command `cocktail plan`: memory, bytes and hours of a run."""

from collections.abc import Sequence

from cocktail_cli.assembly import Command, Extension
from cocktail_cli.options import CHECK


class Plan(Extension):
    """The command alone: no run uses it."""

    @property
    def commands(self) -> Sequence[Command]:
        from .command import plan

        return (Command("plan", CHECK, plan),)


extension = Plan()
