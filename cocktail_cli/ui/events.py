"""Events of a run, as frozen dataclasses. `--json` writes them as they are; display.py draws them.

Field names are the public, versioned interface of `--json`: within version 1 fields are only added. Bytes are
counted on the sockets, framing included; seconds are wall-clock; losses are nats per token. Texts are safe to
show, whoever wrote them, as an event cannot be made with others.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

from cocktail_cli.assembly import events_of_extensions
from cocktail_cli.foreign_text import one_line, paragraphs, readable

VERSION = 1
OWN = ("url", "output_dir", "model", "install")  # fields that this machine's programs need to the letter
NAMES, LONGEST_NAME = ("peer", "hardware"), 128  # characters, as of a word on the wire
T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def event(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose texts are safe to show from the moment it is made."""

    def make_readable(self: Any) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name not in OWN and not isinstance(value, bool | int | float | None):
                line = partial(one_line, limit=LONGEST_NAME) if each.name in NAMES else one_line
                safe = paragraphs if each.name in getattr(kind, "texts", ()) else line
                object.__setattr__(self, each.name, readable(value, safe))

    kind.__post_init__ = make_readable  # type: ignore[attr-defined]
    return dataclass(frozen=True)(kind)


@dataclass(frozen=True)
class Event:
    """An event of a run."""


@dataclass(frozen=True)
class OfExtension(Event):
    """An event that an extension defines."""

    texts: ClassVar[tuple[str, ...]] = ()  # fields whose texts have several lines
    news: ClassVar[bool] = False  # a board shows its sentence among the newest ones

    def sentence(self) -> str | None:
        """Format it as a line for people; None: it has none."""

    def measured(self) -> dict[str, Any]:
        """Return the fields of its line in metrics.jsonl; none: it has no line."""
        return {}

    def recorded(self) -> OfExtension:
        """Return it as the run's folder has it: without a secret."""
        return self


@event
class RunStarted(Event):
    """The hub listens; peers can join."""

    run: str
    url: str
    recipe: str
    recipe_hash: str
    parameters: int  # trained parameters
    steps: int
    output_dir: str
    reach: str = ""  # reachability of the address in the URL
    logging_steps: int = 1  # steps between two plain lines
    round: int = 0  # the next round; above 0 the run was resumed
    versions: dict[str, str] = field(default_factory=dict)  # package versions on the host's machine
    install: str = ""  # the command that installs cocktail elsewhere; empty: no public address is known
    guests: int = 0  # peers from elsewhere that the first step waits for
    invitation: str = ""  # how a machine takes part; empty: by `cocktail join`


@event
class Joined(Event):
    """This machine has joined the run (emitted by `cocktail join`)."""

    run: str
    peer: str  # its name in the run
    recipe: str
    recipe_hash: str
    download_bytes: int  # model and packets to fetch before it can train
    logging_steps: int = 1


@event
class Progressed(Event):
    """A long operation has advanced: fetching the model, catching up, exporting."""

    state: str
    done: int = 0
    total: int = 0  # 0: unknown
    unit: str = ""
    rate: float = 0.0  # recent units per second; 0: not measured
    eta: float | None = None  # seconds; null: unknown


@event
class PeerDeciding(Event):
    """Somebody looks at the run and decides whether to join."""

    peer: str
    hardware: str = ""


@event
class PeerDeclined(Event):
    """Somebody who was deciding went without joining."""

    peer: str


@event
class PeerJoined(Event):
    peer: str
    hardware: str = ""


@event
class Reached(Event):
    """The first peer joined from another machine: the address in the URL works from there."""

    peer: str
    where: str  # "the internet" or "this network"


@event
class PeerReady(Event):
    """A peer holds the global model and takes part from the next round on."""

    peer: str
    round: int
    joining_s: float = 0.0  # since its handshake


@event
class PeerAsks(Event):
    """A newcomer waits for the host's approval: `cocktail peers RUN --approve KEY`."""

    peer: str
    key: str  # its first 16 digits, as the newcomer sees them
    hardware: str = ""


@event
class PeerLeft(Event):
    peer: str
    reason: str
    legacy_bytes: int = 0  # size of the handoff: the residual it left to the aggregators
    how: str = "left"  # or "lost", or "removed"


@event
class Step(Event):
    """A round is committed. Its `loss` is null if it has no new gradient (the drain after the last step)."""

    step: int
    steps: int
    round: int
    loss: float | None  # mean over the trained tokens of the round, at the peers' local models
    peers: int  # members of the round
    tokens: int = 0  # trained tokens counted so far
    accepted: list[str] = field(default_factory=list)  # peers whose packets are in the round
    up_bytes: dict[str, int] = field(default_factory=dict)  # from each peer to the hub, this round
    down_bytes: dict[str, int] = field(default_factory=dict)  # from the hub to each peer, this round
    fetched_bytes: dict[str, int] = field(default_factory=dict)  # part of down_bytes: before a peer was ready
    # 16 bits x parameters x steps / the bytes of a member, without those fetched before it was ready
    ratio_up: dict[str, float] = field(default_factory=dict)
    ratio_down: dict[str, float] = field(default_factory=dict)
    ratio_fp16: float = 0.0  # the same, over both directions of all members
    packet_bytes: int = 0  # size of the aggregate
    fingerprint: str = ""  # of the global model before this round, 16 hex digits
    step_s: float = 0.0
    compute_s: dict[str, float] = field(default_factory=dict)  # seconds of each peer's last step
    wait_s: dict[str, float] = field(default_factory=dict)  # seconds its device then waited for the exchange
    tokens_by_peer: dict[str, int] = field(default_factory=dict)  # trained tokens delivered in this round
    local_steps: int = 1  # steps in this round; the seconds above are for one step
    rung: str = ""  # the setting of this round, for people; "" in `join`
    need: float = 0.0  # steps whose compute an exchange of the recipe's packets takes; 0: unknown
    lr: float | None = None  # learning rate of the step; null: no step was taken
    grad_norm: float | None = None  # before clipping; median over the peers, in `join` this machine's own
    samples: int = 0  # samples counted so far; 0: unknown
    eta_s: float | None = None  # seconds to the end of the run, at the pace of the whole swarm
    extra: dict[str, Any] = field(default_factory=dict)  # fields of extensions

    if not TYPE_CHECKING:  # a type checker must not accept any name

        def __getattr__(self, name: str) -> Any:
            """Return a field of an extension."""
            try:
                return self.__dict__["extra"][name]
            except KeyError:
                raise AttributeError(f"no event of a step has {name!r}") from None


@event
class Eval(Event):
    """The global model was evaluated on held-out data."""

    step: int
    round: int
    loss: float
    tokens: int = 0  # terms of the loss: trained tokens, or samples
    extra: dict[str, Any] = field(default_factory=dict)  # fields of extensions


@event
class Checkpoint(Event):
    """A snapshot of the global model is on disk, in a folder that `from_pretrained` loads."""

    round: int  # the snapshot is the global model before this round
    step: int
    model: str  # folder of the snapshot
    bytes: int  # size of its weights
    seconds: float  # seconds to write it, in parallel with training
    fingerprint: str = ""  # of the global model, 16 hex digits; equal on all peers


@event
class Warning(Event):
    message: str


@event
class RunFinished(Event):
    """The run is over and its model is on disk."""

    run: str
    model: str  # folder that `from_pretrained` loads
    steps: int
    eval_loss: float | None
    reason: str
    planned: int = 0  # planned steps; 0: unknown
    prompt: str | None = ""  # of the held-out data, to try the model with; None: it is none of language
    base_loss: float | None = None  # of the base, on held-out data


@event
class RunPaused(Event):
    """The run is paused; `cocktail resume` continues it."""

    run: str
    steps: int
    planned: int
    reason: str


@event
class Left(Event):
    """This machine has left the run (emitted by `cocktail join`)."""

    run: str
    peer: str
    reason: str
    finished: bool  # the run reached its end
    steps: int = 0  # steps this machine took part in
    up_bytes: int = 0
    down_bytes: int = 0
    share: float | None = None  # of the run's trained tokens so far; null: the hub did not say
    seconds: float = 0.0  # since it joined
    returns: bool = False  # the run goes on or may, and the same command returns to it


def figures_of(extra: Mapping[str, Any]) -> dict[str, float]:
    """Return the further figures of an objective, by name, from the `extra` of an event: `group/name`."""
    groups = ((group, of) for group, of in extra.items() if isinstance(of, dict))
    return {name: of[name] for group, of in groups for name in of if str(name).startswith(f"{group}/")}


def name_of(kind: type[Event]) -> str:
    """Convert a class name to an event name: `PeerJoined` to `peer_joined`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def timestamp(when: datetime | None = None) -> str:
    """Format a time in UTC to the second: `2026-11-20T14:02:40Z`."""
    return (when or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def as_json(event: Event, when: datetime | None = None) -> str:
    """Format an event as one line of the NDJSON stream."""
    head = {"v": VERSION, "t": timestamp(when), "event": name_of(type(event))}
    fields = dataclasses.asdict(event)
    return json.dumps(head | fields.pop("extra", {}) | fields)


def from_json(told: Mapping[str, Any]) -> Event:
    """Rebuild an event from a parsed line of the NDJSON stream."""
    kinds: dict[str, Any] = {
        name_of(kind): kind for kind in Event.__subclasses__() if kind is not OfExtension
    }
    if (name := told["event"]) not in kinds:
        kinds = {name_of(kind): kind for kind in events_of_extensions().values()}
    known = {field.name for field in dataclasses.fields(kinds[name])}
    fields = {key: value for key, value in told.items() if key in known - {"extra"}}
    if "extra" in known:
        others = known | {"v", "t", "event"}
        fields["extra"] = {key: value for key, value in told.items() if key not in others}
    event: Event = kinds[name](**fields)
    return event


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return an event that an extension defines."""
        if name.startswith("_") or name not in (found := events_of_extensions()):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return found[name]
