"""Audits: now and then another peer computes the gradient of a sample that a peer says it has computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, HostParts

if TYPE_CHECKING:
    from recipes.config import Recipe
    from recipes.training import ModelExtension
    from transport.hub import Extend

    from .bodies import AuditStatus


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

    def figures(self) -> type[AuditStatus]:
        from .bodies import AuditStatus

        return AuditStatus

    def above_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        if audits := status.get("audits"):
            wrong = f"{audits['audited']:,} samples, {audits['disagreements']:,} wrong answers"
            yield f"audits: {wrong}, {audits['share']:.1%} of the compute"


extension = Audits()
