"""DPO: adapters learn from pairs of a chosen and a rejected answer."""

from __future__ import annotations

from cocktail_cli.assembly import Extension, PagePart


class PreferenceTuning(Extension):
    """Its section of a recipe makes the objective of peers and hub; this is its part of the page."""

    def page(self) -> PagePart:
        from .rewards_page import RewardsOnPage

        return RewardsOnPage()


extension = PreferenceTuning()
