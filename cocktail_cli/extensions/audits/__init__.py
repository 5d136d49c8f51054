"""Audits: now and then another peer computes the gradient of a sample that a peer says it has computed."""

from __future__ import annotations

from functools import partial

from cocktail_cli.assembly import Extension, HostParts
from recipes.config import Recipe
from recipes.training import ModelExtension
from transport.hub import Extend


class Audits(Extension):
    """Peers sketch the gradients of their samples, and of some of others; the hub compares the sketches."""

    def hub(self, host: HostParts) -> Extend:
        from .hub import AuditCoordinator
        from .keys import Keys

        section = host.recipe.extensions["audits"]
        assert isinstance(section, Keys)
        return partial(AuditCoordinator, share=section.audit_share)

    def model(self, recipe: Recipe) -> ModelExtension:
        from .model import Auditor

        return Auditor(recipe)


extension = Audits()
