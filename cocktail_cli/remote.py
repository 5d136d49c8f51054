"""A run whose folder lies elsewhere, as its hub tells whoever has the run URL: `cocktail status`, again and
again. Of what was before the first question it tells the loss alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cocktail_cli.board import printable
from cocktail_cli.chronicle import STAYS, About, Chronicle, Contribution, Evaluation, Round, Stay, ranked

TIMEOUT = 5.0  # seconds for an answer
ROUNDS = 20_000  # that are kept


class Remote:
    """Looks at a run through its hub. One thread at a time."""

    def __init__(self, url: str) -> None:
        from transport import parse_url

        self.url = parse_url(url)
        self.began = 0.0  # when it was first asked
        self.rounds: list[Round] = []
        self.stays: dict[str, Stay] = {}  # of those who are there
        self.gone: list[Stay] = []
        self.moved: dict[str, tuple[int, int]] = {}  # bytes up and down of each peer, when last asked
        self.before: tuple[tuple[int, float], ...] = ()
        self.answer: Mapping[str, Any] = {}

    def look(self) -> Chronicle:
        """Ask, and add the answer to what was heard before. A hub that is gone is told as such.

        Raises:
            transport.errors.RefusedByHub, Unreachable: at the first question.
        """
        from transport import ask_status
        from transport.errors import LinkLost, Unreachable

        try:
            self.hear(ask_status(self.url, TIMEOUT), time.time())
        except (Unreachable, LinkLost):
            if not self.answer:
                raise
            over = self.answer["state"] in ("finished", "failed")
            return self.told(self.answer["state"] if over else "unreachable")
        return self.told(self.answer["state"])

    def hear(self, answer: Mapping[str, Any], now: float) -> None:
        """One answer, at this time."""
        before, self.answer = self.answer, answer
        self.began = self.began or now
        self.before = self.before if before else tuple((s, loss) for s, loss in answer.get("losses", ()))
        peers = {printable(peer["name"]): peer for peer in answer["peers"]}
        for name in self.stays.keys() - peers.keys():
            self.gone = [*self.gone[-STAYS:], replace(self.stays.pop(name), left=now)]
        for name in peers.keys() - self.stays.keys():
            self.stays[name] = Stay(name, now)
        if before and answer["round"] > before["round"]:
            self.add_round(before, answer, peers, now)
        moved = {name: (peer["up_bytes"], peer["down_bytes"]) for name, peer in peers.items()}
        self.moved = moved

    def add_round(
        self, before: Mapping[str, Any], answer: Mapping[str, Any], peers: Mapping[str, Any], now: float
    ) -> None:
        """What happened since the question before: a round, or a few taken as one."""
        many = answer["round"] - before["round"]
        members = tuple(sorted(name for name, peer in peers.items() if peer["state"] == "training"))
        up = sum(peers[name]["up_bytes"] - self.moved.get(name, (0, 0))[0] for name in members)
        down = sum(peers[name]["down_bytes"] - self.moved.get(name, (0, 0))[1] for name in members)
        took = now - (self.rounds[-1].at if self.rounds else self.began)
        one = Round(
            round=answer["round"] - 1,
            step=answer["step"],
            at=now,
            seconds=took / many,
            loss=answer["loss"],
            members=members,
            up=max(0, up) // many,
            down=max(0, down) // many,
        )
        self.rounds = [*self.rounds[-ROUNDS:], one]

    def told(self, state: str) -> Chronicle:
        answer = self.answer
        peers = [
            Contribution(
                peer=printable(peer["name"]),
                hardware=printable(peer["gpu"]),
                part=peer["share"],
                up=peer["up_bytes"],
                down=peer["down_bytes"],
            )
            for peer in answer["peers"]
        ]
        return Chronicle(
            about=About(printable(answer["run"])),
            state=state,
            step=answer["step"],
            steps=answer["max_steps"],
            started=self.began,
            seen=self.rounds[-1].at if self.rounds else self.began,
            rounds=tuple(self.rounds),
            before=self.before,
            evaluations=tuple(Evaluation(0, s, loss) for s, loss in answer.get("eval_losses", ())),
            stays=(*self.gone, *self.stays.values()),
            contributions=ranked(peers),
            note="Heard from the run's hub: of what was before this page was opened it tells the loss alone.",
        )
