"""The history of a run, read from its output folder, with or without a running hub.

The ledger is authoritative for rounds, losses and samples. Bytes, waiting times, joins and leaves are in
events.jsonl, which may lack the last rounds of a killed hub. Both files only grow, so each look reads only
what is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from cocktail_cli.host import run_folder as in_folder
from cocktail_cli.machine import RunRecord, reread_run
from cocktail_cli.ui import events, named_rewards, stage_lines

from .run_history import (
    SAMPLES,
    SLOW,
    STAYS,
    About,
    Contribution,
    Evaluation,
    Generation,
    Presence,
    Round,
    RunHistory,
    ranked,
)

QUIET = 30.0  # seconds


class RunFolderReader:
    """Read one run's folder incrementally, from one thread at a time.

    Args:
        there: tells whether anything listens at the hub's address; asked after QUIET seconds without news.
    """

    def __init__(self, record: RunRecord, there: Callable[[RunRecord], bool] = RunRecord.hub_listens) -> None:
        self.record, self.folder, self.there = record, Path(record.output_dir), there
        self.asked, self.gone = 0.0, False  # when `there` was last asked, and its answer
        self.events = in_folder.GrowingFile(self.folder / in_folder.EVENTS)
        self.rounds: list[Round] = []  # index = round: the ledger has no gaps
        self.evaluations: tuple[Evaluation, ...] = ()
        self.told: dict[int, dict[str, Any]] = {}  # Step events of rounds not yet read from the ledger
        self.samples: list[Generation] = []
        self.bottleneck = ""
        self.slow: list[events.Culprit] = []
        self.stages: tuple[str, ...] = ()
        self.stays: list[Presence] = []
        self.by_peer: dict[str, Contribution] = {}
        self.about = about(record)
        self.steps, self.reason = record.steps, ""
        self.started: float | None = None
        self.seen: float | None = None

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
        state = self.state(time.time())
        return RunHistory(
            about=self.about,
            state=state,
            step=self.rounds[-1].step if self.rounds else 0,
            steps=self.steps,
            started=self.started,
            seen=self.seen,
            rounds=tuple(self.rounds),
            evaluations=self.evaluations,
            samples=tuple(self.samples),
            bottleneck=self.bottleneck,
            slow=tuple(self.slow),
            stages=self.stages if state == "running" else (),
            stays=tuple(self.stays if state == "running" else self.over()),
            contributions=ranked(self.by_peer, {peer: one.samples for peer, one in self.by_peer.items()}),
            reason="" if state == "running" else self.reason or self.record.reason,
        )

    def state(self, now: float) -> str:
        """Return the state in run.json, corrected for a hub that was killed while `running`."""
        if now - max(self.seen or 0.0, self.asked) > QUIET:
            self.asked, self.gone = now, not self.there(self.record)
        elif now - (self.seen or 0.0) <= QUIET:
            self.gone = False
        return "died" if self.gone and self.record.state == "running" else self.record.state

    def over(self) -> Iterator[Presence]:
        """End every open presence, as a run that is over has no peers even if its hub could not say so."""
        for stay in self.stays:
            gone = stay.left is None and self.seen is not None
            yield replace(stay, left=self.seen, reason="the run ended") if gone else stay

    # ---- the ledger ----------------------------------------------------------------------------------------

    def read_ledger(self) -> None:
        from transport.ledger import Ledger
        from transport.protocol import count_samples

        with Ledger(self.folder / in_folder.LEDGER, write=False) as ledger:
            start = len(self.rounds)
            rows = ledger.rounds(start)
            counted = ledger.counted(start, start + len(rows))  # excludes rounds committed since
            self.evaluations = tuple(
                Evaluation(e.round, e.step, e.loss, named_rewards(e.rewards)) for e in ledger.evaluations()
            )
        for row in rows:
            left_out = tuple(sorted(set(row.members) - set(row.accepted)))
            seconds = max(0.0, row.committed - row.opened)
            told = Round(
                round=row.round,
                step=row.step,
                at=row.committed,
                seconds=seconds,
                loss=row.loss,
                members=row.members,
                left_out=left_out,
                tokens=row.tokens,
            )
            self.rounds.append(told)
            self.seen = max(self.seen or 0.0, row.committed)
            self.started = self.started or row.opened
            for peer in row.members:
                missed = peer in left_out
                self.add(peer, rounds=not missed, left_out=missed)
            if (event := self.told.pop(row.round, None)) is not None:
                self.measure(event)
        for one in counted:
            self.add(one.peer, samples=count_samples(one.ids))

    def add(self, peer: str, **numbers: float) -> Contribution:
        """Add to one peer's sums."""
        had = self.by_peer.get(peer, Contribution(peer))
        sums: dict[str, Any] = {key: getattr(had, key) + value for key, value in numbers.items()}
        self.by_peer[peer] = replace(had, **sums)
        return self.by_peer[peer]

    # ---- events.jsonl --------------------------------------------------------------------------------------

    def hear(self, event: Mapping[str, Any]) -> None:
        """Apply one line of events.jsonl; lines of an unknown kind or version are ignored."""
        if event.get("v") != events.VERSION:
            return
        kind, at = event["event"], datetime.fromisoformat(event["t"].replace("Z", "+00:00")).timestamp()
        self.seen = max(self.seen or 0.0, at)
        if kind == "run_started":
            self.begin(event, at)
        elif kind == "peer_joined":
            peer = event["peer"]
            self.by_peer[peer] = replace(self.add(peer), hardware=event["hardware"])
            self.stays = [*self.stays[-STAYS:], Presence(peer, at)]
        elif kind == "peer_ready":
            self.change(event["peer"], ready=at)
        elif kind == "peer_left":
            self.change(event["peer"], left=at, reason=event["reason"])
        elif kind == "step":
            self.steps, self.bottleneck = event["steps"], event.get("bottleneck", "")
            if event["round"] < len(self.rounds):
                self.measure(event)
            else:
                self.told[event["round"]] = dict(event)
        elif kind == "sample":
            said = (event.get(key, "") for key in ("prompt", "text", "reference"))
            self.samples = [*self.samples[-SAMPLES:], Generation(event["step"], *said)]
        elif kind == "stages":
            self.stages = tuple(stage_lines(event["rings"], event["waiting"]))
        elif kind == "culprit":
            self.slow = [*self.slow[-SLOW:], culprit_of(event)]
        elif kind == "run_finished":
            self.reason = event["reason"]

    def begin(self, event: Mapping[str, Any], at: float) -> None:
        """Apply a launch: peers of an earlier hub that was killed are gone."""
        self.started, self.steps = self.started or at, event["steps"]
        self.about = replace(self.about, parameters=event["parameters"], versions=event.get("versions", {}))
        for peer in {stay.peer for stay in self.stays if stay.left is None}:
            self.change(peer, left=at, reason="the hub was started again")

    def change(self, peer: str, **news: Any) -> None:
        """Update a peer's newest presence."""
        for i in reversed(range(len(self.stays))):
            if self.stays[i].peer == peer:
                self.stays[i] = replace(self.stays[i], **news)
                return

    def measure(self, event: Mapping[str, Any]) -> None:
        """Add what a Step event knows to a round of the ledger."""
        had = self.rounds[event["round"]]
        up, down, fetched = event["up_bytes"], event["down_bytes"], event.get("fetched_bytes", {})
        # A round without a gradient repeats the times of the step before.
        compute = event.get("compute_s", {}) if had.loss is not None else {}
        wait = event.get("wait_s", {}) if had.loss is not None else {}
        self.rounds[had.round] = replace(
            had,
            up=sum(up.get(peer, 0) for peer in had.members),
            down=sum(down.get(peer, 0) - fetched.get(peer, 0) for peer in had.members),
            compute_s=sum(compute.values()),
            wait_s=sum(wait.values()),
            local_steps=event.get("local_steps", 1),
            lr=event.get("lr"),
            grad_norm=event.get("grad_norm"),
            rewards=event.get("rewards", {}),
        )
        sums = {"up": up, "down": down, "fetched": fetched, "compute_s": compute, "wait_s": wait}
        for name, by_peer in sums.items():
            for peer, value in by_peer.items():
                self.add(peer, **{name: value})


def culprit_of(told: Mapping[str, Any]) -> events.Culprit:
    """Read a culprit, of an event or of a hub's answer."""
    said = {key: str(told[key]) for key in ("peer", "cause", "evidence", "remedy")}
    return events.Culprit(**said, lengthened=told["lengthened"], round=told["round"])


def about(record: RunRecord) -> About:
    """Describe the run from the recipe in its folder; an unreadable recipe contributes only its name."""
    known = About(
        run=record.run,
        recipe=record.recipe,
        recipe_hash=record.recipe_hash,
        base_sha256=record.base_sha256,
        data_sha256=record.data_sha256,
    )
    text = Path(record.output_dir) / in_folder.RESOLVED
    return with_recipe(known, text.read_text(encoding="utf-8")) if text.exists() else known


def with_recipe(known: About, text: str) -> About:
    """Add what a recipe's JSON text says; a recipe of another version of the program adds nothing."""
    import yaml

    from recipes.config import public_name, recipe_from_json
    from recipes.errors import InputError
    from recipes.models import method_of, published_recipe

    try:
        recipe = recipe_from_json(text)
    except InputError:
        return known
    return replace(
        known,
        recipe=recipe.name,
        recipe_text=yaml.safe_dump(published_recipe(recipe), sort_keys=False, allow_unicode=True),
        model=public_name(recipe.model.model_name_or_path),
        data=tuple(public_name(dataset.path) for dataset in recipe.datasets),
        method=method_of(recipe),
    )
