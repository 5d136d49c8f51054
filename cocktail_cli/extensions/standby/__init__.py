"""A standby: a second machine that follows the ledger of a run, and takes over when the hub is lost."""

from __future__ import annotations

from collections.abc import Sequence

from cocktail_cli.assembly import Command, Extension
from cocktail_cli.options import RUN, with_extensions


class StandingBy(Extension):
    """The hub announces a round once the standby has it; peers look for the run there if the hub is lost."""

    @property
    def commands(self) -> Sequence[Command]:
        from .command import standby

        return (Command("standby", RUN, with_extensions(standby)),)


extension = StandingBy()
