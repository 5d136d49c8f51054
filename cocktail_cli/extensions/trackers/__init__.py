"""Trackers of experiments: the host reports a run's numbers to TensorBoard, Weights & Biases or Trackio."""

from __future__ import annotations

from collections.abc import Sequence

from cocktail_cli.assembly import Extension, View, ViewParts


class Trackers(Extension):
    """Only the host reports, and only what the recipe asks for."""

    def views(self, parts: ViewParts) -> Sequence[View]:
        """Make a view for each tracker. Raises Failure (preflight) where one is not installed."""
        from .keys import Keys
        from .tracker import Tracker

        section = parts.recipe.extensions["trackers"]
        assert isinstance(section, Keys)
        return [Tracker(name, section.project, parts) for name in section.report_to]


extension = Trackers()
