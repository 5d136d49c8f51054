"""The extensions of this program, what each may bring, and which of them a run uses.

`EXTENSIONS` is the one list of them: a row names a folder of `cocktail_cli.extensions`, whose `extension` is
imported where a run uses it. All that an extension brings does nothing unless it is overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from recipes.config import Recipe
    from recipes.training import ModelExtension
    from transport import Ledger, RunURL
    from transport.hub import Extend
    from transport.protocol import RunKeys, messages


@dataclass(frozen=True)
class HostParts:
    """Parts of a host from which an extension may make its own, beside `transport.hub.HubParts`."""

    recipe: Recipe
    keys: RunKeys
    ledger: Ledger


@dataclass(frozen=True)
class PeerParts:
    """Parts of a peer from which an extension may make its own."""

    recipe: Recipe
    url: RunURL
    key: str  # of this machine, public
    warn: Callable[[str], None]


class PeerExtension:
    """An optional capability of a peer, beside its training. Called by the thread that exchanges."""

    name = ""  # of its bodies: `extra` in Report and Committed

    def report(self) -> bytes:
        """Return the body for a Report; empty: none."""
        return b""

    def committed(self, message: messages.Committed) -> None:
        """Take the Committed of a round, whose `extra` may have a body for it."""

    def farewell(self) -> str:
        """Return a sentence for the user when this peer leaves; empty: none."""
        return ""


class WrittenModel(Protocol):
    """A run whose model is written (`cocktail_cli.host.CommittedModel`)."""

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""

    def card(self, rounds: int, merged: bool = False, more: Sequence[str] = ()) -> str:
        """Render the model card, with `more` lines."""


class Command(NamedTuple):
    """A command of an extension."""

    name: str
    group: str  # of the help page
    function: Callable[..., None]


class Extension:
    """One folder of `cocktail_cli.extensions`."""

    files: Sequence[str] = ()  # that it adds to a model's folder, and that are pushed with it

    @property
    def commands(self) -> Sequence[Command]:
        return ()

    def origin(self, keys: RunKeys) -> Mapping[str, str]:
        """Return words for the origin of a new run's ledger: they are under every head of its chain."""
        return {}

    def wrote_model(self, model: WrittenModel, folder: Path, rounds: int, merged: bool) -> None:
        """Add to a model's folder, once all else is written there."""

    def wrote_run(self, model: WrittenModel, rounds: int) -> None:
        """Add to a run's folder, once nothing else is written there any more."""

    def hub(self, host: HostParts) -> Extend | None:
        """Return what makes its part at the hub; None: it has none."""

    def peer(self, peer: PeerParts) -> PeerExtension | None:
        """Make its part at a peer; None: it has none."""

    def model(self, recipe: Recipe) -> ModelExtension | None:
        """Make its part in a peer's training; None: it has none."""


class Row(NamedTuple):
    """An extension."""

    folder: str
    keys: bool = True  # a section of this name in a recipe turns it on; else every run uses it
    commands: bool = False


EXTENSIONS = (
    Row("audits"),
    Row("proofs", keys=False, commands=True),
    Row("turns"),
)


def recipe_type(names: Iterable[str] | None = None) -> type[Recipe]:
    """Return the schema of recipes with the sections of the extensions among these names; None: of all.

    The name of a section is that of its extension's folder, whose `keys.py` has it.
    """
    folders = {row.folder for row in EXTENSIONS if row.keys}
    return _recipe_type(tuple(sorted(folders if names is None else folders & {*names})))


@cache
def _recipe_type(folders: tuple[str, ...]) -> type[Recipe]:
    from pydantic import create_model

    from recipes.config import Recipe

    if not folders:
        return Recipe
    sections = {name: import_module(f"cocktail_cli.extensions.{name}.keys").Keys for name in folders}
    fields: dict[str, Any] = {name: (section | None, None) for name, section in sections.items()}
    return create_model("Recipe", __base__=Recipe, **fields)


def extension(row: Row) -> Extension:
    """Import an extension."""
    found: Extension = import_module(f"cocktail_cli.extensions.{row.folder}").extension
    return found


def commands() -> Iterator[Command]:
    """Import the extensions that have commands, and yield these."""
    for row in EXTENSIONS:
        if row.commands:
            yield from extension(row).commands


def used(recipe: Recipe) -> Iterator[Extension]:
    """Import the extensions that a run uses, in the order of the rows."""
    for row in EXTENSIONS:
        if not row.keys or row.folder in recipe.extensions:
            yield extension(row)


def files_of(recipe: Recipe) -> list[str]:
    """Name the files that extensions add to a model's folder."""
    return [name for one in used(recipe) for name in one.files]


def hub_extensions(host: HostParts) -> list[Extend]:
    """Return what makes the extensions of a run's hub."""
    return [part for one in used(host.recipe) if (part := one.hub(host)) is not None]


def peer_extensions(peer: PeerParts) -> list[PeerExtension]:
    """Make the extensions of a peer."""
    return [part for one in used(peer.recipe) if (part := one.peer(peer)) is not None]


def model_extensions(recipe: Recipe) -> list[ModelExtension]:
    """Make the extensions of a peer's training."""
    return [part for one in used(recipe) if (part := one.model(recipe)) is not None]
