"""Stages: volunteers' machines hold one model together, each some of its layers, and are one peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import Extension, HostParts, Joining, PagePart, TakingPart

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport.hub import Extend, HubParts
    from transport.scheduling import HubExtension

    from .bodies import StagesStatus
    from .compute import StageMemory, StagePlan


class Stages(Extension):
    """The hub gives machines that lend memory places in rings; the head of a ring takes part as a peer."""

    def pin(self, recipe: Recipe, base: Path) -> Recipe:
        from .compute import cut_at_layers

        return cut_at_layers(recipe, base)

    def prepare(self, work: Any) -> StageMemory | None:
        """Divide the model's layers by memory; None where stages cannot train it."""
        from recipes.errors import ModelError

        from .compute import StageMemory, check_staged

        try:
            check_staged(work.recipe)
        except ModelError:
            return None
        return None if work.memory is None else StageMemory(work.recipe, work.base.folder, work.memory)

    def hub(self, host: HostParts) -> Extend:
        """Coordinate machines from when one comes."""
        from transport.hub import Late

        division = host.work.prepared[self]

        def begin(hub: HubParts) -> HubExtension:
            from .hub import RingCoordinator, Undivided

            return Undivided() if division is None else RingCoordinator(hub, division)

        return Late("stages", begin)

    def joining(self, options: Mapping[str, Any]) -> Joining:
        return Lending(options["layers"])

    def divided(self, recipe: Recipe, folder: Path, machines: int) -> StagePlan:
        from .compute import check_staged, plan_stages

        check_staged(recipe)
        return plan_stages(recipe, folder, machines)

    def events(self) -> tuple[type[Any], ...]:
        from .events import Stages

        return (Stages,)

    def figures(self) -> type[StagesStatus]:
        from .bodies import StagesStatus

        return StagesStatus

    def above_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        from .events import stage_lines

        if stages := status.get("stages"):
            yield from stage_lines(stages)

    def page(self) -> PagePart:
        from .events import StagesOnPage

        return StagesOnPage()


class Lending(Joining):
    """Lends memory of this machine for layers, as many as the hub gives it."""

    machines = 0

    def __init__(self, layers: str) -> None:
        self.layers = layers

    def run(self, me: TakingPart) -> int:
        from .lent_machine import LentMachine, lent_bytes

        return LentMachine(me, lent_bytes(self.layers, me)).run()


extension = Stages()
