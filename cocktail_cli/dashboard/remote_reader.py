"""The history of a run elsewhere, built from its hub's repeated answers to `cocktail status`.

For the time before the first answer only losses, and sums of the peers still present, are known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cocktail_cli.machine import url_to_dial
from cocktail_cli.ui import events, stage_lines

from .run_folder_reader import culprit_of, with_recipe
from .run_history import (
    SLOW,
    STAYS,
    About,
    Contribution,
    Evaluation,
    Presence,
    Round,
    RunHistory,
    ranked,
)

TIMEOUT = 5.0  # seconds to wait for an answer
EVERY = 2.0  # seconds between two questions
ROUNDS = 20_000  # rounds kept in memory
NOTE = "Of what was before this page was opened the hub tells the loss, and the sums of those who are there."


class RemoteReader:
    """Read a run through its hub."""

    def __init__(self, url: str) -> None:
        self.url, self.lock = url_to_dial(url), threading.Lock()
        self.about = About(self.url.run)
        self.began = 0.0  # time of the first answer
        self.rounds: list[Round] = []
        self.stays: dict[str, Presence] = {}  # peers present
        self.gone: list[Presence] = []
        self.slow: dict[tuple[str, str, int], events.Culprit] = {}  # by peer, cause and first round
        self.peers: dict[str, Contribution] = {}  # as of the last answer
        self.tokens: dict[str, int] = {}  # tokens delivered by each peer
        self.before: tuple[tuple[int, float], ...] = ()
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
        from transport import ask_status
        from transport.protocol import LinkLost, Unreachable

        with self.lock:
            try:
                self.hear(ask_status(self.url, TIMEOUT, recipe=not self.answer), time.time())
            except (Unreachable, LinkLost):
                if not self.answer:
                    raise
                if self.answer["state"] not in ("paused", "finished", "stopped", "failed"):
                    return self.told("unreachable")
            return self.told(self.answer["state"])

    def hear(self, answer: Mapping[str, Any], now: float) -> None:
        """Apply one answer, received at `now`."""
        before, self.answer = self.answer, answer
        if not before:
            self.begin(answer, now)
        peers = {peer["name"]: peer for peer in answer["peers"]}
        for name in self.stays.keys() - peers.keys():
            self.gone = [*self.gone[-STAYS:], replace(self.stays.pop(name), left=now)]
        for name in peers.keys() - self.stays.keys():
            self.stays[name] = Presence(name, now - peers[name]["joined_s"])
        had = self.peers
        self.peers = had | {name: contribution_of(name, peer) for name, peer in peers.items()}
        for told in answer.get("culprits", ()):  # the newest figures of each
            self.slow = dict([*self.slow.items()][-SLOW:])
            self.slow[told["peer"], told["cause"], told["since"]] = culprit_of(told)
        self.tokens |= {name: peer["tokens"] for name, peer in peers.items()}
        if before and answer["round"] > before["round"]:
            self.add_round(before, had, now)

    def begin(self, answer: Mapping[str, Any], now: float) -> None:
        known = About(self.about.run, recipe_hash=answer["recipe_hash"], parameters=answer["parameters"])
        self.about = with_recipe(known, answer["recipe"]) if "recipe" in answer else known
        self.began = now
        self.before = tuple((step, loss) for step, loss in answer["losses"])

    def add_round(self, before: Mapping[str, Any], had: Mapping[str, Contribution], now: float) -> None:
        """Append what happened since the previous answer, as one round even where it was several."""
        answer, many = self.answer, self.answer["round"] - before["round"]
        since = {name: self.peers[name].since(had.get(name)) for name in self.stays}
        in_it = {name: one for name, one in since.items() if one.rounds or one.left_out}
        self.rounds = [
            *self.rounds[-ROUNDS:],
            Round(
                round=answer["round"] - 1,
                step=answer["step"],
                at=now,
                seconds=(now - (self.rounds[-1].at if self.rounds else self.began)) / many,
                loss=answer["loss"],
                members=tuple(sorted(in_it)),
                left_out=tuple(sorted(name for name, one in in_it.items() if one.left_out)),
                up=sum(one.up for one in in_it.values()) // many,
                down=sum(one.down - one.fetched for one in in_it.values()) // many,
                compute_s=sum(one.compute_s for one in in_it.values()) / many,
                wait_s=sum(one.wait_s for one in in_it.values()) / many,
                local_steps=answer["local_steps"],
                grad_norm=answer.get("grad_norm"),
                tokens=max(0, answer.get("tokens", 0) - before.get("tokens", 0)) // many,
            ),
        ]

    def told(self, state: str) -> RunHistory:
        answer = self.answer
        return RunHistory(
            about=self.about,
            state=state,
            step=answer["step"],
            steps=answer["max_steps"],
            started=min([self.began, *(stay.joined for stay in (*self.gone, *self.stays.values()))]),
            seen=self.rounds[-1].at if self.rounds else self.began,
            rounds=tuple(self.rounds),
            before=self.before,
            evaluations=tuple(Evaluation(0, s, loss) for s, loss in answer["eval_losses"]),
            bottleneck=(answer.get("bottleneck") or {}).get("line", ""),
            slow=tuple(self.slow.values()),
            stages=tuple(stage_lines(**answer["stages"])) if answer.get("stages") else (),
            stays=(*self.gone, *self.stays.values()),
            contributions=ranked(self.peers, self.tokens),
            note=NOTE,
        )


def contribution_of(name: str, peer: Mapping[str, Any]) -> Contribution:
    """Convert a peer of the hub's answer: sums since it joined."""
    return Contribution(
        peer=name,
        hardware=peer["gpu"],
        rounds=peer["rounds"],
        left_out=peer["left_out"],
        up=peer["up_bytes"],
        down=peer["down_bytes"],
        fetched=peer["fetched_bytes"],
        compute_s=peer["compute_s"],
        wait_s=peer["wait_s"],
    )
