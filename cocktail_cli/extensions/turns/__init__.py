"""Turns: rounds take fewer peers than are ready, one long turn after the other."""

from __future__ import annotations

from functools import partial

from cocktail_cli.assembly import Extension, HostParts
from transport.hub import Extend


class TakingTurns(Extension):
    """The hub chooses the members of each round; peers know nothing of it."""

    def hub(self, host: HostParts) -> Extend:
        from .hub import Turns
        from .keys import Keys

        section = host.recipe.extensions["turns"]
        assert isinstance(section, Keys)
        return partial(Turns, places=section.members_per_round)


extension = TakingTurns()
