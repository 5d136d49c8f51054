"""The history of a run, as dashboard and report show it, and two readers of one. It holds no secret.

A run is read from its output folder, with or without a running hub, or from its hub's answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cocktail_cli.assembly import PageBlocks, ask_status, page_parts, recipe_type, url_to_dial
from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import RunRecord, reread_run
from cocktail_cli.ui import FP16, events

MEASURED = ("up_bytes", "down_bytes", "fetched_bytes", "compute_s", "wait_s")  # of a peer, by its events
STAYS = 2000  # presences remembered; the oldest are dropped first
WINDOW = 5  # rounds that a point of the curve of speed is averaged over
LATELY = 32  # rounds of the figure of speed, as a hub's
QUIET = 30.0  # seconds without news, until a run's hub is looked for
TIMEOUT = 5.0  # seconds to wait for a hub's answer
EVERY = 2.0  # seconds between two questions to it
ROUNDS = 20_000  # rounds kept of a run elsewhere
NOTE = "Of what was before this page was opened the hub tells the loss, and the sums of those who are there."

Point = tuple[float, float]  # of a curve: step, value


@dataclass(frozen=True)
class Round:
    """One round; sums are over its members."""

    round: int
    step: int
    at: float  # time of its commit, seconds since 1970
    seconds: float  # seconds it took
    loss: float | None  # None: no new gradient was delivered
    members: tuple[str, ...]
    left_out: tuple[str, ...] = ()  # members whose packet was late, or refused
    up: int = 0  # bytes exchanged, all members to the hub; 0: not known
    down: int = 0  # excludes downloads before members were ready
    fp16: float = 0.0  # bytes that FP16 would have taken; 0: unknown, or its packets moved nothing
    compute_s: float = 0.0  # seconds of their last steps
    wait_s: float = 0.0  # seconds their devices then waited for the exchange
    tokens: int = 0  # trained tokens that it counted
    lr: float | None = None  # learning rate; None: unknown
    grad_norm: float | None = None  # before clipping, median over the peers

    @property
    def ratio(self) -> float | None:
        """Compression ratio: bytes in FP16 over bytes exchanged."""
        moved = self.up + self.down
        return self.fp16 / moved if moved and self.fp16 else None


@dataclass(frozen=True)
class Presence:
    """A peer's time in the run, from joining to leaving."""

    peer: str
    joined: float  # seconds since 1970
    ready: float | None = None  # since when it takes part; None: not yet, or unknown
    left: float | None = None  # None: still present
    reason: str = ""


@dataclass(frozen=True)
class Contribution:
    """One peer's contribution to the run."""

    peer: str
    hardware: str = ""
    part: float = 0.0  # share of the work
    samples: int = 0  # samples counted; 0: unknown
    tokens: int = 0  # tokens delivered; 0: unknown
    rounds: int = 0  # rounds that contain its packet
    left_out: int = 0  # rounds without its packet, though it was a member
    up_bytes: int = 0
    down_bytes: int = 0
    fetched_bytes: int = 0  # part of `down_bytes`: model and packets, before it was ready
    compute_s: float = 0.0
    wait_s: float = 0.0

    def since(self, before: Contribution | None) -> Contribution:
        """Subtract an earlier state; a peer that was absent or has rejoined counts in full."""
        if before is None or before.up_bytes > self.up_bytes:
            return self
        sums = ("rounds", "left_out", *MEASURED)
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in sums})


@dataclass(frozen=True)
class About:
    """Facts of a run that are known from its start."""

    run: str
    recipe: str = ""  # the recipe's name
    recipe_hash: str = ""
    recipe_text: str = ""  # YAML, without paths of the host's machine
    keys: Mapping[str, str] = field(default_factory=dict)  # defaults by dotted key, where the text is silent
    model: str = ""
    data: tuple[str, ...] = ()
    method: str = ""  # "Full fine-tune", "LoRA adapters"
    term: str = "token"  # what the loss is a mean over
    invitation: str = ""  # how a machine takes part; empty: by `cocktail join`
    base_sha256: str = ""
    data_sha256: str = ""
    parameters: int = 0  # trained parameters; 0: unknown
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunHistory:
    about: About
    state: str  # a key of report_page.STATES
    step: int = 0
    steps: int = 0
    started: float | None = None  # seconds since 1970
    seen: float | None = None  # time of the newest entry
    rounds: tuple[Round, ...] = ()
    before: tuple[Point, ...] = ()  # losses of rounds before the first answer
    evaluations: tuple[Point, ...] = ()  # losses of the global model on held-out data
    rung: str = ""  # setting of the newest round
    need: float = 0.0  # why it has that one: see `Step`; 0: unknown
    parts: Mapping[str, Any] = field(default_factory=dict)  # what extensions know, by their parts
    stays: tuple[Presence, ...] = ()
    contributions: tuple[Contribution, ...] = ()  # largest share first
    note: str = ""  # a remark to the reader
    reason: str = ""  # reason of the end

    @cached_property
    def of_extensions(self) -> list[PageBlocks]:
        """Return what extensions add to the page."""
        return [part.show(self.parts.get(name)) for name, part in page_parts().items()]

    @property
    def losses(self) -> list[Point]:
        """The losses of all rounds that trained."""
        return [*self.before, *((r.step, r.loss) for r in self.rounds if r.loss is not None)]

    @property
    def best(self) -> Point | None:
        """The evaluation of the lowest loss; the first of several."""
        return min(self.evaluations, key=lambda one: one[::-1], default=None)

    @cached_property
    def trained(self) -> list[Round]:
        """The rounds that trained, and took some time."""
        return [r for r in self.rounds if r.tokens and r.seconds > 0]

    @property
    def speeds(self) -> list[Point]:
        """Trained tokens a second of the rounds that trained, each with the WINDOW - 1 before it.

        A single round can be over at once: peers may have computed before it opened.
        """
        ends = range(1, len(trained := self.trained) + 1)
        return [(trained[i - 1].step, speed_of(trained[max(0, i - WINDOW) : i])) for i in ends]

    @property
    def recent_speed(self) -> float:
        """Trained tokens a second of the last LATELY rounds that trained."""
        return speed_of(self.trained[-LATELY:])

    @property
    def present(self) -> list[str]:
        return sorted({stay.peer for stay in self.stays if stay.left is None})


def speed_of(rounds: Sequence[Round]) -> float:
    """Compute the trained tokens a second of these rounds together."""
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)


def ranked(by_peer: Mapping[str, Contribution]) -> tuple[Contribution, ...]:
    """Set each peer's share of the work; the largest comes first."""
    whole = sum(one.samples or one.tokens for one in by_peer.values()) or 1
    parts = (replace(one, part=(one.samples or one.tokens) / whole) for one in by_peer.values())
    return tuple(sorted(parts, key=lambda one: (-one.part, one.peer)))


# ---- readers -----------------------------------------------------------------------------------------------


class RunFolderReader:
    """Read one run's folder incrementally, from one thread at a time.

    The ledger is authoritative for rounds, losses and samples. Bytes, waiting times, joins and leaves are in
    events.jsonl, which may lack the last rounds of a killed hub. Both files only grow, so each look reads
    only what is new.

    Args:
        there: tells whether anything listens at the hub's address; asked after QUIET seconds without news.
    """

    def __init__(self, record: RunRecord, there: Callable[[RunRecord], bool] = RunRecord.hub_listens) -> None:
        self.record, self.folder, self.there = record, Path(record.output_dir), there
        self.asked, self.gone = 0.0, False  # when `there` was last asked, and its answer
        self.events = in_folder.GrowingFile(self.folder / in_folder.EVENTS)
        self.known, self.parts = RunHistory(about(record), record.state, steps=record.steps), page_parts()
        self.rounds: list[Round] = []  # index = round: the ledger has no gaps
        self.told: dict[int, dict[str, Any]] = {}  # Step events of rounds not yet read from the ledger
        self.by_peer: dict[str, Contribution] = {}

    def look(self) -> RunHistory:
        """Read what is new and return the run as it is now.

        Raises:
            LedgerError: the ledger is missing or unreadable.
        """
        from recipes.foreign_json import parse_json

        self.record = reread_run(self.record)
        for line in self.events.new_lines():
            with suppress(ValueError, TypeError, LookupError, AttributeError):  # cut short, or damaged
                self.hear(parse_json(line))
        self.read_ledger()
        self.know(
            state=self.state(time.time()),
            step=max(self.record.steps, self.rounds[-1].step if self.rounds else 0),  # the last may end later
            rounds=tuple(self.rounds),
            contributions=ranked(self.by_peer),
        )
        known = self.known
        if known.state == "running":
            return replace(known, reason="")
        stays = tuple(  # over too, even if the hub could not say so
            replace(one, left=known.seen, reason="the run ended") if one.left is None else one
            for one in known.stays
        )
        return replace(known, stays=stays, reason=known.reason or self.record.reason)

    def know(self, **news: Any) -> None:
        self.known = replace(self.known, **news)

    def state(self, now: float) -> str:
        """Return the state in run.json, corrected for a hub that was killed while `running`."""
        seen = self.known.seen or 0.0
        if now - max(seen, self.asked) > QUIET:
            self.asked, self.gone = now, not self.there(self.record)
        elif now - seen <= QUIET:
            self.gone = False
        return "died" if self.gone and self.record.state == "running" else self.record.state

    # ---- the ledger ----------------------------------------------------------------------------------------

    def read_ledger(self) -> None:
        from transport.ledger import Ledger
        from transport.protocol import count_samples

        with Ledger(self.folder / in_folder.LEDGER, write=False) as ledger:
            start = len(self.rounds)
            rows = ledger.rounds(start)
            counted = ledger.counted(start, start + len(rows))  # excludes rounds committed since
            found = ledger.evaluations()
        self.know(evaluations=tuple((e.step, e.loss) for e in found))
        for row in rows:
            left_out = tuple(sorted(set(row.members) - set(row.accepted)))
            gap = row.opened - self.rounds[-1].at if self.rounds else 0.0  # below 0: they overlap
            seconds = max(0.0, row.committed - row.opened + (gap if gap < QUIET else 0.0))
            fixed = row.round, row.step, row.committed, seconds, row.loss, row.members, left_out
            self.rounds.append(Round(*fixed, tokens=row.tokens))
            self.saw(row.committed, since=row.opened)
            for peer in row.members:
                self.add(peer, rounds=peer not in left_out, left_out=peer in left_out)
            if (event := self.told.pop(row.round, None)) is not None:
                self.measure(event)
        for one in counted:
            self.add(one.peer, samples=count_samples(one.ids))

    def saw(self, at: float, since: float | None = None) -> None:
        """Note the time of an entry, and that of the run's start unless it is known."""
        self.know(seen=max(self.known.seen or 0.0, at), started=self.known.started or since)

    def add(self, peer: str, **numbers: float) -> None:
        """Add to one peer's sums."""
        had = self.by_peer.get(peer, Contribution(peer))
        sums: dict[str, Any] = {key: getattr(had, key) + value for key, value in numbers.items()}
        self.by_peer[peer] = replace(had, **sums)

    # ---- events.jsonl --------------------------------------------------------------------------------------

    def hear(self, event: Mapping[str, Any]) -> None:
        """Apply one line of events.jsonl; lines of an unknown kind or version are ignored."""
        if event.get("v") != events.VERSION:
            return
        kind, at = event["event"], datetime.fromisoformat(event["t"].replace("Z", "+00:00")).timestamp()
        self.saw(at, since=at if kind == "run_started" else None)
        parts = {name: one.heard(self.known.parts.get(name), event) for name, one in self.parts.items()}
        self.know(parts=parts)
        if kind == "run_started":  # peers of an earlier hub that was killed are gone
            news = {"parameters": event["parameters"], "versions": event.get("versions", {})}
            self.know(steps=event["steps"], about=replace(self.known.about, **news))
            for peer in self.known.present:
                self.change(peer, left=at, reason="the hub was started again")
        elif kind == "peer_joined":
            peer = event["peer"]
            had = self.by_peer.get(peer, Contribution(peer))
            self.by_peer[peer] = replace(had, hardware=event["hardware"])
            self.know(stays=(*self.known.stays[-STAYS:], Presence(peer, at)))
        elif kind == "peer_ready":
            self.change(event["peer"], ready=at)
        elif kind == "peer_left":
            self.change(event["peer"], left=at, reason=event["reason"])
        elif kind == "step":
            self.know(steps=event["steps"], rung=event.get("rung", ""), need=event.get("need", 0.0))
            if event["round"] < len(self.rounds):
                self.measure(event)
            else:
                self.told[event["round"]] = dict(event)
        elif kind == "run_finished":
            self.know(reason=event["reason"])

    def change(self, peer: str, **news: Any) -> None:
        """Update a peer's newest presence."""
        stays = [*self.known.stays]
        newest = next((i for i in reversed(range(len(stays))) if stays[i].peer == peer), None)
        if newest is not None:
            stays[newest] = replace(stays[newest], **news)
            self.know(stays=tuple(stays))

    def measure(self, event: Mapping[str, Any]) -> None:
        """Add what a Step event knows to a round of the ledger."""
        had = self.rounds[event["round"]]
        if had.loss is None:  # it repeats the times of the step before
            event = {**event, "compute_s": {}, "wait_s": {}}
        up, down, fetched, compute, wait = sums = [event.get(name, {}) for name in MEASURED]
        for name, by_peer in zip(MEASURED, sums, strict=True):
            for peer, value in by_peer.items():
                self.add(peer, **{name: value})
        sent = sum(up.get(peer, 0) for peer in had.members)
        received = sum(down.get(peer, 0) - fetched.get(peer, 0) for peer in had.members)
        self.rounds[had.round] = replace(
            had,
            up=sent,
            down=received,
            fp16=event.get("ratio_fp16", 0.0) * (sent + received),
            compute_s=sum(compute.values()),
            wait_s=sum(wait.values()),
            lr=event.get("lr"),
            grad_norm=event.get("grad_norm"),
        )


class RemoteReader:
    """Build the history of a run elsewhere from its hub's repeated answers to `cocktail status`.

    For the time before the first answer only losses, and sums of the peers still present, are known.
    """

    def __init__(self, url: str) -> None:
        self.url, self.lock = url_to_dial(url), threading.Lock()
        self.known = RunHistory(About(self.url.run), "", note=NOTE)
        self.parts = page_parts()
        self.peers: dict[str, Contribution] = {}  # as of the last answer
        self.answer: Mapping[str, Any] = {}

    def watch(self) -> None:
        """Poll now and from a thread from now on: a hub does not tell what happened between two questions.

        Raises:
            RefusedByHub, Unreachable: at the first question.
        """
        self.look()
        threading.Thread(target=self.go_on, name="watch", daemon=True).start()

    def go_on(self) -> None:
        from transport.protocol import TransportError

        while True:
            time.sleep(EVERY)
            with suppress(TransportError):  # refused by now: the history so far stays
                self.look()

    def look(self) -> RunHistory:
        """Ask the hub and return the history so far. A hub that stops answering is shown as gone.

        Raises:
            RefusedByHub, Unreachable: at the first question.
        """
        from transport.protocol import LinkLost, Unreachable

        with self.lock:
            try:
                self.hear(ask_status(self.url, TIMEOUT, recipe=not self.answer), time.time())
            except (Unreachable, LinkLost):
                if not self.answer:
                    raise
                if self.known.state not in ("paused", "finished", "stopped", "failed"):
                    return replace(self.known, state="unreachable")
            return self.known

    def hear(self, answer: Mapping[str, Any], now: float) -> None:
        """Apply one answer, received at `now`."""
        before, had, known = self.answer, self.peers, self.known
        self.answer = answer
        if not before:
            about = replace(known.about, recipe_hash=answer["recipe_hash"], parameters=answer["parameters"])
            about = with_recipe(about, answer["recipe"]) if "recipe" in answer else about
            losses = tuple((step, loss) for step, loss in answer["losses"])
            known = replace(known, about=about, seen=now, before=losses)
        peers = {peer["name"]: peer for peer in answer["peers"]}
        sums = ("tokens", "rounds", "left_out", *MEASURED)
        self.peers = had | {
            name: Contribution(name, peer["gpu"], **{key: peer[key] for key in sums})
            for name, peer in peers.items()
        }
        stays = (
            replace(one, left=now) if one.left is None and one.peer not in peers else one
            for one in known.stays[-STAYS:]
        )
        here = known.present
        new = [Presence(name, now - peers[name]["joined_s"]) for name in peers if name not in here]
        self.known = replace(
            known,
            state=answer["state"],
            step=answer["step"],
            steps=answer["max_steps"],
            rung=answer["rung"],
            need=answer["need"],
            started=min([known.started or now, *(one.joined for one in new)]),
            evaluations=tuple((step, loss) for step, loss in answer["eval_losses"]),
            parts={name: one.answered(known.parts.get(name), answer) for name, one in self.parts.items()},
            stays=(*stays, *new),
            contributions=ranked(self.peers),
        )
        if before and answer["round"] > before["round"]:
            self.add_round(before, had, now)

    def add_round(self, before: Mapping[str, Any], had: Mapping[str, Contribution], now: float) -> None:
        """Append what happened since the previous answer, as one round even where it was several."""
        answer, known, many = self.answer, self.known, self.answer["round"] - before["round"]
        since = [self.peers[name].since(had.get(name)) for name in known.present]
        in_it = [one for one in since if one.rounds or one.left_out]
        told = Round(
            round=answer["round"] - 1,
            step=answer["step"],
            at=now,
            seconds=(now - (known.seen or now)) / many,
            loss=answer["loss"],
            members=tuple(one.peer for one in in_it),
            left_out=tuple(one.peer for one in in_it if one.left_out),
            up=sum(one.up_bytes for one in in_it) // many,
            down=sum(one.down_bytes - one.fetched_bytes for one in in_it) // many,
            fp16=2.0 * FP16 * known.about.parameters * len(in_it) * answer["local_steps"],
            compute_s=sum(one.compute_s for one in in_it) / many,
            wait_s=sum(one.wait_s for one in in_it) / many,
            grad_norm=answer.get("grad_norm"),
            tokens=max(0, answer.get("tokens", 0) - before.get("tokens", 0)) // many,
        )
        self.known = replace(known, seen=now, rounds=(*known.rounds[-ROUNDS:], told))


def about(record: RunRecord) -> About:
    """Describe the run from the recipe in its folder; an unreadable recipe contributes only its name."""
    named = ("run", "recipe", "recipe_hash", "base_sha256", "data_sha256")
    known = About(**{name: getattr(record, name) for name in named})
    text = Path(record.output_dir) / in_folder.RESOLVED
    return with_recipe(known, text.read_text(encoding="utf-8")) if text.exists() else known


def flattened(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of a recipe's values, each with its value in words."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flattened(f"{path}.{name}" if path else str(name), inner)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for number, inner in enumerate(value):
            yield from flattened(f"{path}.{number}", inner)
    else:
        yield path, "-" if value is None else str(value)


def with_recipe(known: About, text: str) -> About:
    """Add what a recipe's JSON text says; a recipe of another version of the program adds nothing."""
    import yaml

    from recipes.config import method_of, public_name, published_recipe, recipe_from_json
    from recipes.errors import InputError

    try:
        recipe = recipe_from_json(text, recipe_type)
    except InputError:
        return known
    text = yaml.safe_dump(published_recipe(recipe), sort_keys=False, allow_unicode=True)
    values, given = (
        dict(flattened("", recipe.model_dump(mode="json", exclude_defaults=one))) for one in (False, True)
    )
    return replace(
        known,
        recipe=recipe.name,
        recipe_text=text,
        keys={key: value for key, value in values.items() if key not in given},
        model=public_name(recipe.model.model_name_or_path),
        data=tuple(public_name(dataset.path) for dataset in recipe.datasets),
        method=method_of(recipe),
        term=recipe.objective.term,
        invitation=recipe.objective.invitation,
    )
