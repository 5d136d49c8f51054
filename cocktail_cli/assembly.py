"""The extensions of this program, what each may bring, and which of them a run uses.

`EXTENSIONS` is the one list of them: a row names a folder of `cocktail_cli.extensions`, whose `extension` is
imported where a run uses it. All that an extension brings does nothing unless it is overridden.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from threading import Event, Lock
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TextIO,
    TypeVar,
    runtime_checkable,
)

from recipes.errors import Finding, ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from msgspec import Struct
    from torch import nn

    from recipes.config import Recipe
    from recipes.planning import MemoryPlan
    from recipes.training import Delivery, ModelExtension, Peer
    from transport import Ledger, PeerLink, RunURL
    from transport.direct import PeerServer
    from transport.hub import Extend
    from transport.protocol import CurveKeys, Route, RunKeys, WeightedPacket, messages
    from transport.transfer import Download

T = TypeVar("T")
RUN, CHECK, RESULTS, TOOLS = "Run", "Check", "Results", "Tools"  # panels of `cocktail --help`
NETWORK, MACHINE, WHEN, OUTPUT = "Network", "This machine", "When", "Output"  # panels of a command's options


@dataclass(frozen=True)
class HostParts:
    """Parts of a host from which an extension may make its own, beside `transport.hub.HubParts`."""

    recipe: Recipe
    keys: RunKeys
    ledger: Ledger
    work: Any  # `cocktail_cli.host.RunDelegate`


class View(Protocol):
    """A sink for the events of a run (`cocktail_cli.ui.Event`). The main thread calls both methods."""

    def show(self, event: Any) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Screen(View, Protocol):
    """A view that draws a run on a terminal."""

    def look_on(self, ask: Callable[[], dict[str, Any]]) -> None:
        """Call `ask` for the hub's status again and again, in a thread, and show it."""

    def watch(self, status: dict[str, Any]) -> None:
        """Show a run that this process takes no part in, as its hub says."""


@dataclass(frozen=True)
class ViewParts:
    """Parts of a launch from which an extension may make views of the run."""

    recipe: Recipe
    folder: Path  # of the run
    tell: Callable[[Any], None]  # shows an event soon, to all views; from any thread


@dataclass(frozen=True)
class PeerParts:
    """Parts of a peer from which an extension may make its own."""

    recipe: Recipe
    url: RunURL
    key: str  # of this machine, public
    warn: Callable[[str], None]
    devices: Sequence[str]  # that train
    link: PeerLink  # its `welcome` is here
    server: PeerServer | None = None  # where other peers reach this one


class Exchange(Protocol):
    """Exchanges updates with the run: the link to the hub does, or what an extension puts around it."""

    @property
    def upload_s(self) -> float:
        """Return the seconds that the newest upload took."""

    def exchange(
        self, round: int, packet: bytes, report: messages.Report, beside: Mapping[str, bytes] = {}
    ) -> messages.Committed:
        """Do as `PeerLink.exchange`."""


class PeerExtension:
    """An optional capability of a peer, beside its training. Times are monotonic. `report`, `exchanged` and
    `committed` are called by the thread that exchanges, `received` by that of the link, the others by that
    which trains.
    """

    name = ""  # of its bodies: in `extra` of Welcome, Report and Committed, and in Extension messages
    serves = False  # other peers fetch from this one, where they can dial it

    def beside(self, processes: set[int]) -> AbstractContextManager[None]:
        """Run beside the training, which these processes do."""
        return nullcontext()

    def received(self, body: bytes) -> None:
        """Take the body of an Extension message; it must not wait. Raises ProtocolError where it cannot be
        read: that is counted."""

    def files(self, downloads: Sequence[Download]) -> None:
        """Begin to fetch elsewhere some of the files that are being fetched from the hub."""

    def exchange_by(self, inner: Exchange) -> Exchange:
        """Return what exchanges updates, by `inner` or in its place, before the first round."""
        return inner

    def changed(self, report: messages.Report) -> messages.Report:
        """Change what goes with an update before it is sent; the last row's extension does so first."""
        return report

    def built(self, files: Mapping[str, Path], peer: Peer) -> None:
        """Note that the model is built, and the objects of the run that stay on this machine's disk."""

    def fetch(self, round: int) -> bytes | None:
        """Fetch the packet of a round; None: the hub sends it. Raises as `PeerLink.fetch`."""
        return None

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down so far, beside those of the link to the hub."""
        return 0, 0

    def leave(self) -> None:
        """End what it does with other peers, before this one says goodbye to the hub."""

    def took_round(self, round: messages.Round, asked: float, now: float) -> None:
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


class LatePeer(PeerExtension):
    """An extension of a peer that is imported with the first body for it, and then takes this one's place.

    Args:
        among: the extensions of the peer, with this one.
    """

    def __init__(
        self, name: str, begin: Callable[[], PeerExtension | None], among: list[PeerExtension]
    ) -> None:
        self.name, self._begin, self._among = name, begin, among
        self._ours: set[int] | None = None  # processes that train
        self._stack, self._lock = ExitStack(), Lock()

    @contextmanager
    def beside(self, processes: set[int]) -> Iterator[None]:
        self._ours = processes
        with self._stack:
            yield

    def received(self, body: bytes) -> None:
        self._here().received(body)

    def committed(self, message: messages.Committed) -> None:
        if self.name in message.extra:
            self._here().committed(message)

    def _here(self) -> PeerExtension:
        """Return the extension, once it has begun."""
        with self._lock:
            if self in self._among:
                self._one = self._begin() or PeerExtension()
                if self._ours is not None:
                    self._stack.enter_context(self._one.beside(self._ours))
                self._among[self._among.index(self)] = self._one
            return self._one


class PeerBuilder(Protocol):
    """Builds the peer of a session, which other processes of this machine train."""

    @property
    def pids(self) -> set[int]:
        """Return these processes."""

    def build(self, recipe: Recipe, base: Path, snapshot: Path | None, micro_batch: int, round: int) -> Peer:
        """Build it with the global model of `round`: that of the snapshot's folder, else the base's. With a
        `micro_batch` of 0 the peer's is measured, unless it has one."""

    def check(self) -> None:
        """Raise Failure where one of them has ended."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class TakingPart:
    """Describes how a machine takes part in a run."""

    url: RunURL
    limits: Any  # `cocktail_cli.volunteer.VolunteerLimits`
    show: Callable[[Any], None]  # shows an event
    patience: float  # seconds to keep trying while the hub cannot be reached
    welcomed: Callable[[], None]  # to be called once the hub has begun a session
    # Has sessions within these limits, with these parts around them too, until none is to follow; returns the
    # exit status.
    take_part: Callable[[Any, Sequence[Joining]], int]


class Joining:
    """An optional capability around the sessions that a volunteer has in a run, one after the other."""

    machines = 1  # that are one peer together; 0: it is not known yet how many
    process = True  # that of a session is its own: it ends where leaving takes too long
    keeps = True  # a peer leaves a checkpoint for its return

    def run(self, me: TakingPart) -> int | None:
        """Take part otherwise than by sessions that follow at once; return the exit status. None: it does
        not."""
        return None

    def terms(self) -> Sequence[str]:
        """Describe when this machine takes part, for the question of `cocktail join`."""
        return ()

    def begin(self, devices: Sequence[str], warn: Callable[[str], None]) -> None:
        """Note the devices that are to train, once before the first session."""

    def check(self, recipe: Recipe) -> None:
        """Raise an error of recipes where this run is not for it."""

    def model(self) -> nn.Module | None:
        """Return the model that trains, where it is made already; None: the run's, by its config.json."""

    def builder(
        self, link: PeerLink, leave: Callable[[str], None], vram_limit: int | None
    ) -> PeerBuilder | None:
        """Start what builds a session's peer, with so many bytes of each GPU; None: this process does.
        `leave` asks the session to end, and says why."""
        return None

    def wait(self, show: Callable[[Any], None]) -> int | None:
        """Wait until a session may begin; return an exit status where this machine leaves for good."""
        return None

    def beside(self, processes: set[int], leave: Callable[[str], None]) -> AbstractContextManager[None]:
        """Run beside a session, in which these processes train; `leave` asks it to end, and says why."""
        return nullcontext()

    def returns_after(self, reason: str) -> bool:
        """Tell whether another session is to follow one that was asked to leave for this reason."""
        return False


@dataclass(frozen=True)
class ModelOnDisk:
    """A whole model of a run on its host's disk: the base at first, a snapshot, at the end the run's own."""

    folder: Path
    round: int  # it is the global model before this one
    step: int
    tell: Callable[[Any], None]  # shows an event
    stop: Callable[[], bool]  # the host wants to end


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


class DividedPeer(Protocol):
    """A plan of a peer that is several machines."""

    @property
    def sent(self) -> float:
        """Return the bytes that each machine sends to others for a token."""

    def memory(self, whole: MemoryPlan) -> MemoryPlan:
        """Return the memory of the machine that needs most, where one alone would need `whole`."""


class Crossing(NamedTuple):
    """Counts how often the aggregate of a round crosses lines, where not the hub alone sends it."""

    hub: float  # its line
    peer: float  # that of a peer which others can reach
    always: bool  # also where that is slower


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


@dataclass(frozen=True)
class Server:
    """A server of this machine that others may not be able to dial."""

    keys: CurveKeys
    host: str  # address at which this machine reaches it
    port: int
    warn: Callable[[str], None] = lambda _: None
    what: str = "the run"  # it serves, as people call it


class Lead(Protocol):
    """A way by which others reach a server of this machine, until it is closed."""

    claimed: Event  # it is there
    address: str  # by which other machines dial the server: "place:port/name"

    def close(self) -> None: ...


class Extension:
    """One folder of `cocktail_cli.extensions`."""

    files: Sequence[str] = ()  # that it adds to a model's folder, and that are pushed with it

    def origin(self, keys: RunKeys) -> Mapping[str, str]:
        """Return words for the origin of a new run's ledger: they are under every head of its chain."""
        return {}

    def pin(self, recipe: Recipe, base: Path) -> Recipe:
        """Write into a new run's recipe what follows from the model in the folder `base`."""
        return recipe

    def chosen(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return keys of its section for a user's own model and data, beside those that were chosen."""
        return {}

    def prepare(self, work: Any) -> Any:
        """Compute what takes seconds when a hub is opened, of the run of a `cocktail_cli.host.RunDelegate`,
        whose `prepared` has it by extension. One that takes over has no time then."""

    def check_host(self, recipe: Recipe) -> None:
        """Raise an error of recipes where a host lacks what its part needs later: no run is prepared then."""

    def model_here(self, work: Any, model: ModelOnDisk, options: Mapping[str, Any]) -> None:
        """Use a model of a run (a `cocktail_cli.host.RunDelegate`), by the options of its that were given. It
        may take its time: at the end it is called in the main thread, before that in the one which writes
        snapshots. It must not raise."""

    # `model`: a `cocktail_cli.host.CommittedModel`.
    def wrote_model(self, model: Any, folder: Path, rounds: int, merged: bool) -> None:
        """Add to a model's folder, once all else is written there."""

    def described(self, recipe: Recipe, ledger: Ledger) -> Iterator[str]:
        """Yield lines of a model's card: what the ledger of its run says of this."""
        yield from ()

    def wrote_run(self, model: Any, rounds: int) -> None:
        """Add to a run's folder, once nothing else is written there any more."""

    def files_in_use(self, ledger: Ledger) -> Mapping[Path, bool]:
        """Return its files in the folder of a ledger, each with whether it is what was written."""
        return {}

    def hub(self, host: HostParts) -> Extend | None:
        """Return what makes its part at the hub; None: it has none."""

    def judge(self, work: Any, round: int) -> UpdateJudge | None:
        """Make what judges the updates of a run (a `cocktail_cli.host.RunDelegate`) that goes on with
        `round`; None: it judges none."""

    def views(self, parts: ViewParts) -> Sequence[View]:
        """Make its views of a run's events, before anything is prepared. They are shown all that `--json`
        has, and closed at the end. Raises Failure where the run lacks what its recipe wants."""
        return ()

    def open_screen(self, out: TextIO, err: TextIO, color: bool) -> Screen | None:
        """Open a screen on a terminal; results go to `out`, all else to `err`. None: it draws nothing."""

    def peer(self, peer: PeerParts) -> PeerExtension | None:
        """Make its part at a peer; None: it has none."""

    def line(self, link: PeerLink) -> PeerExtension | None:
        """Make its part at a machine that has a line to the hub and trains nothing; None: it has none."""

    def model(self, recipe: Recipe) -> ModelExtension | None:
        """Make its part in a peer's training; None: it has none."""

    def devices_each(self, options: Mapping[str, Any]) -> int:
        """Return how many devices a peer trains on, by the options of its that were given."""
        return 1

    def pick_devices(self, wanted: str, options: Mapping[str, Any]) -> Sequence[str]:
        """Pick the devices of a peer; none: it has no say. Raises Failure (usage, preflight)."""
        return ()

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

    def others_send(self, status: Mapping[str, Any]) -> bool:
        """Tell whether aggregates come from others than the hub alone."""
        return False

    def divided(self, recipe: Recipe, folder: Path, machines: int) -> DividedPeer | None:
        """Plan a peer that is so many machines, of the model in a folder; None: it makes none. Raises
        ModelError."""
        return None

    def crossing(self, recipe: Recipe, reachable: int, peers: int) -> Crossing | None:
        """Return how aggregates come to peers, of which some are reachable: their addresses are told to the
        others. None: all from the hub."""
        return None

    def dialled(self, recipe: Recipe) -> bool:
        """Tell whether peers of this run are dialled by others, also those that its host starts."""
        return False

    def page(self) -> PagePart | None:
        """Make its part of a run's page; None: it has none."""

    def checks(self) -> Mapping[str, Callable[[], Finding]]:
        """Return its checks of this machine for `cocktail doctor`, by what they are about."""
        return {}

    def places(self, options: Mapping[str, Any]) -> Sequence[str]:
        """Return what leads to a hub, for its run URL, by the options of its that were given. Raises Failure
        (usage), and Unreachable where nothing is there."""
        return ()

    def lead(self, place: str, server: Server) -> Lead | None:
        """Let a place lead to a server of this machine; None: it does not know how."""

    def hub_routes(self, url: RunURL) -> Sequence[Route]:
        """Return the ways to a hub; none: it adds nothing to the hub's address."""
        return ()

    def machine_routes(self, address: str) -> Sequence[Route]:
        """Return the ways to a server at the address of a `Lead`. Raises UrlError."""
        return ()


class Option(NamedTuple):
    """An option that an extension adds to commands of others."""

    name: str
    help: str
    kind: type[Any] | str  # of its value; or the function of the extension that reads what is typed
    panel: str  # of the help page
    metavar: str | None = None
    bounds: tuple[int, ...] = ()  # the least, and the most
    setting: bool = True  # may stand in config.toml
    excluded: tuple[str, str, str] | tuple[()] = ()  # by this option beside it; why, and a hint

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
    """An extension. A run uses it where a recipe has a section of its name, or an option of it is given."""

    folder: str
    always: bool = False  # each run uses it that does not say that it does without
    # Halves that are imported once they are needed: "peer" with the first body for it, "hub" with a Hello
    # that has one; and, where it is "dialled", with the first peer that others can reach.
    late: tuple[str, ...] = ()
    keys: bool = False  # it has a section of recipes
    commands: Mapping[str, str] = {}  # group of the help page by the name of a function of its `command`
    shows: tuple[str, ...] = ()  # of its commands: they show a run, with the options of `launch` for that
    options: tuple[Option, ...] = ()
    options_of: tuple[str, ...] = ()  # commands that have them
    draws: bool = False  # it has a screen, which is opened where a run is shown on a terminal
    leaves: tuple[str, ...] = ()  # files and folders in a run's folder that carry no truth
    names: tuple[str, ...] = ()  # that it adds to the package `cocktail_cli`
    removed: Mapping[str, str] = {}  # what is gone, as it was typed -> what to type now
    # Asked for ways to other machines where a place is named, or the environment has one of these variables.
    dials: tuple[str, ...] = ()


PYTHON_API = (
    *("launch", "resume", "join", "Run", "events"),
    *("Altered", "ConnectionLost", "InvalidInput", "NoResult", "OutOfResources", "PreflightFailed"),
    *("Rejected", "Unreachable"),
)
RELAY = "Be reachable through this `cocktail relay` too."
PAGE, SHOWN = "Show a page in the browser during the run.", "cocktail dashboard RUN shows it at any time"
NO_PAGE = ("detach", "with --detach there is nobody to show a page to", SHOWN)
HOURS, UNTIL = "Take part in these hours: 22:00-07:00.", "Leave for good at this time: 08:00."
IDLE, COOL = "Pause while others use the GPU (NVIDIA).", "Pause while the GPU is hotter (NVIDIA)."
EVALUATE = "Measure models by this function of yours."
SPREAD = "Spread each peer here over N GPUs."
EACH = "cocktail join RUN_URL --layers auto, on each machine"
LAYERS = "Lend memory for some layers; the hub places them."
PLACED = "the hub places a machine with one device, at any hour"
ONE_DEVICE = ("layers", f"--layers and --gpus: {PLACED}", "give one of them")
ANY_HOUR = ("layers", f"--layers and --hours, --until and the like: {PLACED}", "give one of them")
EXTENSIONS = (
    Row("api", names=PYTHON_API),
    Row(
        "availability",
        options_of=("join",),
        options=(
            Option("--hours", HOURS, "parse_hours", WHEN, "FROM-TO", excluded=ANY_HOUR),
            Option("--until", UNTIL, "parse_time", WHEN, "TIME", setting=False, excluded=ANY_HOUR),
            Option("--only-idle", IDLE, bool, WHEN, excluded=ANY_HOUR),
            Option("--max-temp", COOL, int, WHEN, "CELSIUS", (40, 110), excluded=ANY_HOUR),
        ),
    ),
    Row("aggregators", keys=True),
    Row("audits", keys=True),
    Row("board", draws=True),
    Row("doctor", commands={"doctor": CHECK}),
    Row("dpo", keys=True),
    Row(
        "multi_gpu",
        options_of=("launch", "resume", "join"),
        options=(Option("--gpus", SPREAD, int, MACHINE, "N", (1,), excluded=ONE_DEVICE),),
    ),
    Row(
        "plan",
        commands={"plan": CHECK},
        removed={
            "plan --bandwidth": "cocktail plan --lines 200 (Mbit/s)",
            **dict.fromkeys(("plan --up", "plan --down"), "cocktail plan --lines 20/100 (Mbit/s)"),
            **dict.fromkeys(("plan --hub-up", "plan --hub-down"), "cocktail plan --lines hub=100/100"),
            "plan --listening": "cocktail plan --lines listen=4",
        },
    ),
    Row("proofs", always=True, late=("peer",), commands={"verify": RESULTS}),
    Row(
        "reach",
        commands={"relay": RUN},
        options_of=("launch", "resume", "standby"),
        options=(Option("--relay", RELAY, str, NETWORK, "HOST[:PORT]", setting=False),),
        dials=("HTTPS_PROXY", "ALL_PROXY"),
    ),
    Row(
        "stages",
        keys=True,
        options_of=("join",),
        options=(Option("--layers", LAYERS, str, MACHINE, "auto|SIZE"),),
        removed=dict.fromkeys(("stage", "join --ring"), EACH),
    ),
    Row("privacy", keys=True, names=("join_privately", "PrivateRows")),  # before loops: it withholds losses
    Row(
        "own_loop",
        keys=True,
        names=("join_with", "CocktailCallback", "save_base"),
        options_of=("launch", "resume"),
        options=(Option("--evaluate", EVALUATE, "parse_function", MACHINE, "MOD:FUNC", setting=False),),
    ),
    Row("ddp_hook", names=("CocktailState", "cocktail_hook")),
    Row("results", keys=True),
    Row(
        "standby",
        always=True,
        late=("hub", "peer"),
        keys=True,
        commands={"standby": RUN},
        shows=("standby",),
    ),
    Row("turns", keys=True),
    Row("trust", keys=True),
    Row("trackers", keys=True, leaves=("tracking",)),
    Row(
        "dashboard",
        leaves=("report.html", "comparison.html"),
        commands={"dashboard": RUN, "report": RESULTS},
        options_of=("launch", "resume"),
        options=(Option("--dashboard", PAGE, bool, OUTPUT, setting=False, excluded=NO_PAGE),),
    ),
    Row("passing", always=True, late=("hub", "peer", "dialled"), keys=True),
    Row("diagnosis", always=True),  # the last: it measures how long the others take
)

WITHOUT = "without"  # key of a recipe: extensions of each run that this one does without

# commands that show a run
SHOWING = ("launch", "resume", "join", *(name for row in EXTENSIONS for name in row.shows))


def recipe_type(names: Iterable[str] | None = None) -> type[Recipe]:
    """Return the schema of recipes with the keys of extensions among these names; None: with all.

    The name of a section is that of its extension's folder, whose `keys.py` has it.
    """
    folders = {row.folder for row in EXTENSIONS if row.keys}
    if any(row.always for row in EXTENSIONS):
        folders.add(WITHOUT)
    return _recipe_type(tuple(sorted(folders if names is None else folders & {*names})))


@cache
def _recipe_type(folders: tuple[str, ...]) -> type[Recipe]:
    from pydantic import Strict, create_model

    from recipes.config import Recipe, key

    if not folders:
        return Recipe
    names = [name for name in folders if name != WITHOUT]
    sections = {name: import_module(f"cocktail_cli.extensions.{name}.keys").Keys for name in names}
    fields: dict[str, Any] = {name: (section | None, None) for name, section in sections.items()}
    if WITHOUT in folders:
        usual: Any = Literal[tuple(row.folder for row in EXTENSIONS if row.always)]
        several: Any = tuple[usual, ...]
        fields[WITHOUT] = (Annotated[several, Strict(False)], key((), "capabilities that are not wanted"))
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
    """Import all that a run may use: of an unknown one's events and status each may have some."""
    return [extension_of(row) for row in EXTENSIONS if row.always or row.keys or row.options]


def extension_of(row: Row) -> Extension:
    """Import the extension of a row."""
    extension: Extension = import_module(f"cocktail_cli.extensions.{row.folder}").extension
    return extension


def commands() -> Iterator[tuple[str, Callable[..., None]]]:
    """Import the commands of extensions; yield each, after its group of the help page."""
    for row in EXTENSIONS:
        for name, group in row.commands.items():
            yield group, getattr(import_module(f"cocktail_cli.extensions.{row.folder}.command"), name)


def rows_of(recipe: Recipe, given: Given = NONE_GIVEN) -> list[Row]:
    """Return the extensions that a run uses, in the order of the rows; those that its recipe names are not
    late."""
    named, without = {*recipe.extensions, *given}, getattr(recipe, WITHOUT, ())
    rows = (row._replace(late=()) if row.folder in named else row for row in EXTENSIONS)
    return [row for row in rows if row.folder in named or (row.always and row.folder not in without)]


def used(recipe: Recipe, given: Given = NONE_GIVEN, half: str = "hub") -> Iterator[Extension]:
    """Import the extensions that a run uses, but for those whose half here, "hub" or "peer", begins later."""
    return (extension_of(row) for row in rows_of(recipe, given) if half not in row.late)


def _parts(extensions: Iterable[Extension], make: Callable[[Extension], T | None]) -> list[T]:
    return [part for one in extensions if (part := make(one)) is not None]


def api() -> dict[str, str]:
    """Return the names that extensions add to the package `cocktail_cli`, each with its extension."""
    return {name: row.folder for row in EXTENSIONS for name in row.names}


def options_of(command: str) -> Iterator[tuple[str, Option]]:
    """Yield the options that extensions add to a command, each with its extension."""
    for row in EXTENSIONS:
        yield from ((row.folder, option) for option in row.options if command in row.options_of)


def for_peers(given: Given, before: Mapping[str, Any] = {}) -> Given:
    """Return the options that a launch hands to its peers: as they are given, else as they were `before`, by
    their names in Python."""
    found = dict[str, dict[str, Any]]()
    for folder, option in options_of("join"):
        value = given.get(folder, {}).get(option.parameter, before.get(option.parameter))
        if value is not None and (folder, option) in options_of("launch"):
            found.setdefault(folder, {})[option.parameter] = value
    return found


def words_of(given: Given) -> list[str]:
    """Return the words of a `join` with these options."""
    typed = (
        (option.name, given.get(folder, {}).get(option.parameter)) for folder, option in options_of("join")
    )
    return [word for name, value in typed if value is not None for word in (name, str(value))]


def asked_for(given: Given) -> Iterator[tuple[Extension, Mapping[str, Any]]]:
    """Import the extensions of which options were given; yield each with these."""
    yield from ((extension_of(row), given[row.folder]) for row in EXTENSIONS if row.folder in given)


def devices_each(given: Given) -> int:
    """Return how many devices each peer of this machine trains on."""
    return max((one.devices_each(options) for one, options in asked_for(given)), default=1)


def pick_devices(wanted: str, given: Given) -> Sequence[str]:
    """Pick the devices of a peer. Raises Failure."""
    from cocktail_cli.machine import pick_device

    found = (one.pick_devices(wanted, options) for one, options in asked_for(given))
    return next(filter(None, found), ()) or [pick_device(wanted)]


def joining_of(given: Given) -> list[Joining]:
    """Make the parts of extensions around a volunteer's sessions."""
    return [part for one, options in asked_for(given) if (part := one.joining(options)) is not None]


def files_of(recipe: Recipe) -> list[str]:
    """Name the files that extensions add to a model's folder."""
    return [name for one in used(recipe) for name in one.files]


def pinned(recipe: Recipe, base: Path) -> Recipe:
    """Write into a new run's recipe what its extensions make of the model in the folder `base`."""
    for one in used(recipe):
        recipe = one.pin(recipe, base)
    return recipe


def prepared(work: Any) -> dict[Extension, Any]:
    """Compute what the extensions of a run need when its hub is opened."""
    return {one: one.prepare(work) for one in used(work.recipe)}


def hub_extensions(host: HostParts) -> list[Extend]:
    """Return what makes the extensions of a run's hub."""
    from transport.hub import HubParts, Late
    from transport.scheduling import HubExtension

    def begin(row: Row, hub: HubParts) -> HubExtension:
        extend = extension_of(row).hub(host)
        return HubExtension() if extend is None else extend(hub)

    def half(row: Row) -> Extend | None:
        if "hub" in row.late and not host.ledger.noted(row.folder):
            return Late(row.folder, partial(begin, row), "dialled" in row.late)
        return extension_of(row).hub(host)

    return [extend for row in rows_of(host.recipe) if (extend := half(row)) is not None]


def files_in_use(ledger: Ledger) -> dict[Path, bool]:
    """Return the files of extensions in the folder of a ledger, each with whether it is what was written."""
    return {path: whole for one in everyone() for path, whole in one.files_in_use(ledger).items()}


def update_judges(work: Any, round: int) -> list[UpdateJudge]:
    """Make what judges the updates of a run that goes on with `round`."""
    return _parts(used(work.recipe), lambda one: one.judge(work, round))


def model_here(work: Any, model: ModelOnDisk, given: Given = NONE_GIVEN) -> None:
    """Let the extensions of a run use a model."""
    for row in rows_of(work.recipe):
        if "hub" not in row.late:
            extension_of(row).model_here(work, model, given.get(row.folder, {}))


def views_of(parts: ViewParts, given: Given = NONE_GIVEN) -> list[View]:
    """Make the views of a run that its extensions have."""
    return [view for one in used(parts.recipe, given) for view in one.views(parts)]


def open_screen(out: TextIO, err: TextIO, color: bool) -> Screen | None:
    """Open a screen on a terminal; None: no extension has one."""
    found = (extension_of(row).open_screen(out, err, color) for row in EXTENSIONS if row.draws)
    return next(found, None)


def peer_extensions(peer: PeerParts) -> list[PeerExtension]:
    """Make the extensions of a peer."""
    now = {*peer.link.welcome.extra}
    if peer.server is not None:
        now |= {row.folder for row in EXTENSIONS if "dialled" in row.late}
    return _halves(rows_of(peer.recipe), lambda one: one.peer(peer), now)


def line_extensions(link: PeerLink) -> list[PeerExtension]:
    """Make the extensions of a machine that has a line to a hub and trains nothing."""
    return _halves((row for row in EXTENSIONS if row.always), lambda one: one.line(link))


def _halves(
    rows: Iterable[Row], make: Callable[[Extension], PeerExtension | None], now: Collection[str] = ()
) -> list[PeerExtension]:
    """Make the peer's halves of extensions; those that are late later, unless they are among `now`."""
    found: list[PeerExtension] = []
    for row in rows:
        if "peer" in row.late and row.folder not in now:
            found.append(LatePeer(row.folder, partial(lambda one: make(extension_of(one)), row), found))
        elif (half := make(extension_of(row))) is not None:
            found.append(half)
    return found


def model_extensions(recipe: Recipe) -> list[ModelExtension]:
    """Make the extensions of a peer's training."""
    return _parts(used(recipe, half="peer"), lambda one: one.model(recipe))


def divided(recipe: Recipe, folder: Path, machines: int) -> DividedPeer:
    """Plan a peer that is so many machines, of the model in a folder. Raises ModelError."""
    plans = (one.divided(recipe, folder, machines) for one in used(recipe))
    if (plan := next(filter(None, plans), None)) is None:
        raise ModelError("a peer of this recipe cannot be several machines", "stages={}")
    return plan


def crossing(recipe: Recipe, reachable: int, peers: int) -> Crossing | None:
    """Return how aggregates come to peers, of which some are reachable; None: all from the hub."""
    return next(iter(_parts(used(recipe, half=""), lambda one: one.crossing(recipe, reachable, peers))), None)


def dialled(recipe: Recipe) -> bool:
    """Tell whether peers of this run are dialled by others, also those that its host starts."""
    return any(one.dialled(recipe) for one in used(recipe))


def page_parts() -> dict[str, PagePart]:
    """Make the parts of extensions in the page of any run, by their names."""
    return {type(part).__name__: part for one in everyone() if (part := one.page()) is not None}


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


def dialling(named: bool) -> Iterator[Extension]:
    """Import the extensions that have ways of their own, where a place is named or the environment asks for
    them."""
    for row in EXTENSIONS:
        if row.dials and (
            named or any(os.environ.get(name) for one in row.dials for name in (one, one.lower()))
        ):
            yield extension_of(row)


def url_to_dial(text: str) -> RunURL:
    """Parse a run URL, to be dialled by all ways that this machine has. Raises UrlError, Failure."""
    from transport import parse_url

    url = replace(parse_url(text), dial=hub_routes)
    hub_routes(url)  # what the environment names wrongly is told at once
    return url


def hub_routes(url: RunURL) -> Sequence[Route]:
    """Return the ways to a hub, in the order in which they are tried; none: only TCP to its address."""
    return next(filter(None, (one.hub_routes(url) for one in dialling(bool(url.places)))), ())


def machine_routes(address: str) -> Sequence[Route]:
    """Return the ways to a server at "host:port", or at the address of a `Lead`. Raises UrlError."""
    from transport.protocol import parse_address
    from transport.wire import TcpRoute

    found = (one.machine_routes(address) for one in dialling("/" in address) if "/" in address)
    return next(filter(None, found), ()) or (TcpRoute(*parse_address(address)),)


def places_of(given: Given) -> tuple[str, ...]:
    """Return what leads to a hub, for its run URL, by the options of extensions that were given. Raises
    Failure (usage), and Unreachable where nothing is there."""
    return tuple(place for one, options in asked_for(given) for place in one.places(options))


def leads(places: Iterable[str], server: Server) -> Iterator[Lead]:
    """Let places lead to a server of this machine."""
    for place in places:
        yield from (lead for one in dialling(True) if (lead := one.lead(place, server)) is not None)
