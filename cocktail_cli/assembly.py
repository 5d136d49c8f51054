"""The extensions of this program, what each may bring, and which of them a run uses.

`EXTENSIONS` is the one list of them: a row names a folder of `cocktail_cli.extensions`, whose `extension` is
imported where a run uses it. All that an extension brings does nothing unless it is overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from msgspec import Struct

    from recipes.config import Recipe
    from recipes.models import Base
    from recipes.training import Delivery, ModelExtension
    from transport import Ledger, RunURL
    from transport.hub import Extend
    from transport.protocol import RunKeys, WeightedPacket, messages

NETWORK, MACHINE, WHEN, OUTPUT = "Network", "This machine", "When", "Output"  # panels of a command's options


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
    devices: Sequence[str]  # that train


class PeerExtension:
    """An optional capability of a peer, beside its training. Times are monotonic. `report`, `exchanged` and
    `committed` are called by the thread that exchanges, the others by that which trains.
    """

    name = ""  # of its bodies: `extra` in Report and Committed

    def beside(self, processes: set[int]) -> AbstractContextManager[None]:
        """Run beside the training, which these processes do."""
        return nullcontext()

    def took_round(self, asked: float, now: float) -> None:
        """Note that a round begins, which was asked for at `asked`."""

    def fetched(self, kind: str, started: float, now: float) -> None:
        """Note that an object of a round is here: its "lease", or the "packet" with its aggregate."""

    def report(self, delivery: Delivery, now: float) -> bytes:
        """Return the body for a Report that is sent now; empty: none."""
        return b""

    def exchanged(self, uploaded: float, now: float) -> None:
        """Note that a round is committed; its update was up at `uploaded`."""

    def committed(self, message: messages.Committed) -> None:
        """Take the Committed of a round, whose `extra` may have a body for it."""

    def farewell(self) -> str:
        """Return a sentence for the user when this peer leaves; empty: none."""
        return ""


class Joining:
    """An optional capability around the sessions that a volunteer has in a run, one after the other."""

    def terms(self) -> Sequence[str]:
        """Describe when this machine takes part, for the question of `cocktail join`."""
        return ()

    def begin(self, devices: Sequence[str], warn: Callable[[str], None]) -> None:
        """Note the devices that are to train, once before the first session."""

    def wait(self, show: Callable[[Any], None]) -> int | None:
        """Wait until a session may begin; return an exit status where this machine leaves for good."""
        return None

    def beside(self, processes: set[int], leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Run beside a session, in which these processes train; `leave` asks it to end, and says why."""
        return nullcontext()

    def returns_after(self, reason: str) -> bool:
        """Tell whether another session is to follow one that was asked to leave for this reason."""
        return False


class HostedModel(Protocol):
    """A run's model at its host (`cocktail_cli.host.RunDelegate`)."""

    recipe: Recipe
    base: Base
    corpus: Any  # `Corpus | StreamedCorpus` of `recipes.data`
    model: Any  # `cocktail_cli.host.CommittedModel`
    tell: Callable[[str, str], None]  # (peer, message) for the host; set once there is a hub


class UpdateJudge:
    """Judges updates before they are summed. It is called in the commit thread, which it may not hold up."""

    def objection(self, peer: str, packet: bool = True) -> str:
        """Return why a peer's packet is refused, or its handoff; empty: it is not."""
        return ""

    def weight(self, peer: str) -> float:
        """Return what a peer's updates count for, of their weight."""
        return 1.0

    def committed(self, packet: bytes, updates: Sequence[WeightedPacket], held: frozenset[str]) -> None:
        """Take the aggregate of a durable round, its updates, and the peers whose packets were shortened."""

    def close(self) -> None:
        """End what runs beside."""


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


@dataclass(frozen=True)
class PageBlocks:
    """Figures, sentences and sections that an extension adds to the page of a run."""

    figures: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    sections: Mapping[str, Sequence[tuple[str, Any]]] = field(default_factory=dict)  # blocks, by their title


class PagePart:
    """An extension's part of a run's page. What is `known` of a run is its own, and never changed; None at
    first.
    """

    def heard(self, known: Any, event: Mapping[str, Any]) -> Any:
        """Return what is known after an event of the run, as `--json` has it."""
        return known

    def answered(self, known: Any, status: Mapping[str, Any]) -> Any:
        """Return what is known after a hub's answer."""
        return known

    def show(self, known: Any) -> PageBlocks:
        """Return what the page shows of it."""
        return PageBlocks()


class Extension:
    """One folder of `cocktail_cli.extensions`."""

    files: Sequence[str] = ()  # that it adds to a model's folder, and that are pushed with it

    @property
    def commands(self) -> Sequence[Command]:
        """Return its commands. Its row says that it has some."""
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

    def judge(self, work: HostedModel, round: int) -> UpdateJudge | None:
        """Make what judges the updates of a run that goes on with `round`; None: it judges none."""

    def peer(self, peer: PeerParts) -> PeerExtension | None:
        """Make its part at a peer; None: it has none."""

    def model(self, recipe: Recipe) -> ModelExtension | None:
        """Make its part in a peer's training; None: it has none."""

    def joining(self, options: Mapping[str, Any]) -> Joining | None:
        """Make its part around a volunteer's sessions, by the options of its that were given."""
        return None

    def events(self) -> tuple[type[Any], ...]:
        """Return the events that it defines, each a `cocktail_cli.ui.events.OfExtension`."""
        return ()

    def figures(self) -> type[Struct] | None:
        """Return the fields that its hubs add to a status, with their types and usual values."""

    def above_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        """Yield its lines of `cocktail status`, before the table of peers."""
        yield from ()

    def below_peers(self, status: Mapping[str, Any]) -> Iterator[str]:
        """Yield its lines after that table."""
        yield from ()

    def hubs_line(self, status: Mapping[str, Any]) -> tuple[float, float]:
        """Return the bytes a second that a hub's line carries for one peer, up and down; 0: not known."""
        return 0.0, 0.0

    def page(self) -> PagePart | None:
        """Make its part of a run's page; None: it has none."""


class Option(NamedTuple):
    """An option that an extension adds to commands of others."""

    commands: tuple[str, ...]
    name: str
    help: str
    kind: type[Any] | str  # of its value; or the function of the extension that reads what is typed
    panel: str  # of the help page
    metavar: str | None = None
    bounds: tuple[int, int] | tuple[()] = ()
    setting: bool = True  # may stand in config.toml

    @property
    def parameter(self) -> str:
        """Return its name in Python."""
        return self.name.lstrip("-").replace("-", "_")

    def reader(self, folder: str) -> Callable[[str], Any]:
        """Return what reads a text: of an extension, which is imported then."""
        return lambda text: getattr(import_module(f"cocktail_cli.extensions.{folder}"), str(self.kind))(text)


Given = Mapping[str, Mapping[str, Any]]  # the options that were given, by extension
NONE_GIVEN: Given = {}


class Row(NamedTuple):
    """An extension. A run uses it where a recipe has a section of its name, or an option of it is given; one
    that has neither is used by each run."""

    folder: str
    keys: bool = True  # it has a section of recipes
    commands: bool = False
    options: tuple[Option, ...] = ()


EXTENSIONS = (
    Row(
        "availability",
        keys=False,
        options=(
            Option(
                ("join",), "--hours", "Take part in these hours: 22:00-07:00.", "parse_hours", WHEN, "FROM-TO"
            ),
            Option(
                ("join",),
                "--until",
                "Leave for good at this time: 08:00.",
                "parse_time",
                WHEN,
                "TIME",
                setting=False,
            ),
            Option(("join",), "--only-idle", "Pause while others use the GPU (NVIDIA).", bool, WHEN),
            Option(
                ("join",),
                "--max-temp",
                "Pause while the GPU is hotter (NVIDIA).",
                int,
                WHEN,
                "CELSIUS",
                (40, 110),
            ),
        ),
    ),
    Row("audits"),
    Row("proofs", keys=False, commands=True),
    Row("turns"),
    Row("trust"),
    Row("dpo"),
    Row("diagnosis", keys=False),  # the last: it measures how long the others take
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


def reader_of(error: BaseException | None) -> str:
    """Say which section of a recipe reads the rows of an error that names their columns; empty: none does."""
    columns = frozenset(getattr(error, "columns", ()))
    if not columns:
        return ""
    from recipes.config import extension_sections

    for name, section in extension_sections(recipe_type()):
        if section.row_columns and section.row_columns <= columns:
            names = " and ".join(sorted(section.row_columns))
            return f"rows with {names} need a section `{name}:` ({name}={{}} lora_r=16)"
    return ""


def everyone() -> list[Extension]:
    """Import all extensions: of an unknown run's events and status each may have some."""
    return [extension_of(row) for row in EXTENSIONS]


def extension_of(row: Row) -> Extension:
    """Import the extension of a row."""
    extension: Extension = import_module(f"cocktail_cli.extensions.{row.folder}").extension
    return extension


def commands() -> Iterator[Command]:
    """Import the extensions that have commands, and yield these."""
    for row in EXTENSIONS:
        if row.commands:
            yield from extension_of(row).commands


def used(recipe: Recipe, given: Given = NONE_GIVEN) -> Iterator[Extension]:
    """Import the extensions that a run uses, in the order of the rows."""
    for row in EXTENSIONS:
        if row.folder in {*recipe.extensions, *given} or not (row.keys or row.options):
            yield extension_of(row)


def options_of(command: str) -> Iterator[tuple[str, Option]]:
    """Yield the options that extensions add to a command, each with its extension."""
    for row in EXTENSIONS:
        yield from ((row.folder, option) for option in row.options if command in option.commands)


def joining_of(given: Given) -> list[Joining]:
    """Make the parts of extensions around a volunteer's sessions."""
    rows = (row for row in EXTENSIONS if row.folder in given)
    found = (extension_of(row).joining(given[row.folder]) for row in rows)
    return [part for part in found if part is not None]


def files_of(recipe: Recipe) -> list[str]:
    """Name the files that extensions add to a model's folder."""
    return [name for one in used(recipe) for name in one.files]


def hub_extensions(host: HostParts) -> list[Extend]:
    """Return what makes the extensions of a run's hub."""
    return [part for one in used(host.recipe) if (part := one.hub(host)) is not None]


def update_judges(work: HostedModel, round: int) -> list[UpdateJudge]:
    """Make what judges the updates of a run that goes on with `round`."""
    return [judge for one in used(work.recipe) if (judge := one.judge(work, round)) is not None]


def peer_extensions(peer: PeerParts) -> list[PeerExtension]:
    """Make the extensions of a peer."""
    return [part for one in used(peer.recipe) if (part := one.peer(peer)) is not None]


def model_extensions(recipe: Recipe) -> list[ModelExtension]:
    """Make the extensions of a peer's training."""
    return [part for one in used(recipe) if (part := one.model(recipe)) is not None]


def hubs_line(status: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bytes a second that a hub's line carries for one peer, up and down; 0: not known."""
    found = [one.hubs_line(status) for one in everyone()]
    return max(up for up, _ in found), max(down for _, down in found)


def page_parts() -> dict[str, PagePart]:
    """Make the parts of extensions in the page of any run, by their folders."""
    return {row.folder: part for row in EXTENSIONS if (part := extension_of(row).page()) is not None}


def events_of_extensions() -> dict[str, type[Any]]:
    """Return the events that extensions define, by the names of their classes."""
    return {kind.__name__: kind for one in everyone() for kind in one.events()}


def ask_status(url: RunURL, timeout: float, recipe: bool = False) -> dict[str, Any]:
    """Ask a hub for its status, with the figures of all extensions. Raises as `transport.ask_status`."""
    from transport import ask_status

    return with_figures(ask_status(url, timeout, recipe=recipe))


def with_figures(status: dict[str, Any]) -> dict[str, Any]:
    """Check the fields of extensions in a hub's status, and add those that it lacks. Raises ProtocolError."""
    from msgspec import to_builtins

    from transport.peer import check_answer

    for kind in filter(None, (one.figures() for one in everyone())):
        check_answer(status, kind, "status")
        status = to_builtins(kind()) | status
    return status
