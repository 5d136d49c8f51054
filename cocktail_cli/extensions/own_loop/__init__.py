"""Own loops: any trainer, any objective, any data joins a run (`join_with`, `CocktailCallback`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocktail_cli.assembly import (
    Extension,
    HostParts,
    ModelOnDisk,
    PeerExtension,
    PeerParts,
)
from cocktail_cli.errors import Failure

if TYPE_CHECKING:
    from recipes.config import Recipe
    from transport.hub import Extend
    from transport.protocol import messages

API = {"join_with": "swarm", "CocktailCallback": "trainer_callback", "save_base": "named_tensors"}


def __getattr__(name: str) -> Any:
    """Import the API at first use: it brings torch."""
    if name not in API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{API[name]}", __name__), name)


def parse_function(text: str) -> Callable[..., float]:
    """Import `module:function`, from the working directory too. Raises typer.BadParameter."""
    import typer

    module, _, name = text.partition(":")
    sys.path.append(os.getcwd())  # the last: no folder here hides a package
    try:
        function: Callable[..., float] = getattr(import_module(module), name)
    except Exception as error:  # the module is the host's, and may raise anything
        raise typer.BadParameter(f"{text!r}: {error}; write MODULE:FUNCTION, as of mine.py here") from error
    return function


class Paced(PeerExtension):
    name = "own_loop"

    def changed(self, report: messages.Report) -> messages.Report:
        """Report the seconds that a lease would have taken at a peer's pace: its loop's batches are not as
        long as its leases, and leases follow the pace."""
        from msgspec.structs import replace

        if (samples := sum(report.figures)) > 0:
            report = replace(report, compute_s=report.compute_s * report.tokens / samples)
        return report


class OwnLoops(Extension):
    """Its section of a recipe has the objective, and opens the model as named tensors."""

    def pin(self, recipe: Recipe, base: Path) -> Recipe:
        from .named_tensors import check_base

        check_base(base)
        return recipe

    def hub(self, host: HostParts) -> Extend:
        from .hub import WeighedClaims

        return WeighedClaims

    def check_host(self, recipe: Recipe) -> None:
        """Raise Failure where `--evaluate` is given, and peers have no loops of their own."""
        if "own_loop" not in recipe.extensions:
            hints = ("without it: the run's own objective is measured (eval_steps=100)",)
            raise Failure("usage", "--evaluate is for runs with a section `own_loop:`", hints=hints)

    def model_here(self, work: Any, model: ModelOnDisk, options: Mapping[str, Any]) -> None:
        """Measure a model by the host's own function, if one was named."""
        if (function := options.get("evaluate")) is not None and not model.stop():
            from .named_tensors import measure

            model.tell(measure(function, model))

    def peer(self, peer: PeerParts) -> PeerExtension:
        return Paced()


extension = OwnLoops()
