"""Evaluations of x': each member computes the held-out loss on one part of the evaluation set.

An evaluation is due before the first step, then whenever `eval_every` steps have passed, and of the finished
model. If a part is lost with its peer, the evaluation is repeated in the next round. Of the final one
only the missing parts are assigned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transport.ledger import EvaluationRow
from transport.protocol import messages

REWARDS = 3  # of the chosen and of the rejected answers, share of pairs in which the chosen one has more


@dataclass
class Evaluation:
    """One evaluation of x' of `round`, in `parts` parts; `holders` are the sessions that compute them."""

    round: int
    step: int
    parts: int
    final: bool
    holders: dict[int, str] = field(default_factory=dict)  # part -> session
    results: dict[int, messages.Evaluated] = field(default_factory=dict)  # by part

    def arrived(self, session: str, m: messages.Evaluated) -> bool:
        """Take the result of a part; False where this session does not hold that part."""
        if m.round != self.round or self.holders.get(m.part) != session or m.part in self.results:
            return False
        self.results[m.part] = m
        return True

    def lost(self, session: str) -> bool:
        """Drop an ended session. Returns whether a part is missing now."""
        missing = [p for p, holder in self.holders.items() if holder == session and p not in self.results]
        for part in missing:
            del self.holders[part]
        return bool(missing)

    def part_of(self, session: str) -> int | None:
        """Return the part that this session has to compute, or None."""
        return next((p for p, s in self.holders.items() if s == session and p not in self.results), None)

    @property
    def unheld(self) -> list[int]:
        """List the parts that are neither computed nor being computed."""
        return [p for p in range(self.parts) if p not in self.holders and p not in self.results]

    @property
    def awaited(self) -> bool:
        return any(p not in self.results for p in self.holders)

    @property
    def whole(self) -> bool:
        return len(self.results) == self.parts

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.results.values())

    @property
    def rewards(self) -> tuple[float, ...]:
        """Average the rewards of preference pairs; empty where there are none."""
        parts = [self.results[p] for p in sorted(self.results)]
        return mean_rewards([(part.rewards, part.tokens) for part in parts])

    @property
    def loss(self) -> float:
        """Compute the mean over the tokens; nan where there are none."""
        # by part, never by arrival: float sums depend on order
        total = sum(self.results[p].loss_sum for p in sorted(self.results))
        return total / self.tokens if self.tokens else float("nan")


def mean_rewards(parts: Sequence[tuple[Sequence[float], int]]) -> tuple[float, ...]:
    """Average the rewards of preference pairs over peers; empty where some peer sent none.

    Args:
        parts: sums of a peer, and the number of its pairs, in an order that does not depend on arrival.
    """
    pairs = sum(count for _, count in parts)
    sums = [rewards for rewards, count in parts if count]
    if not pairs or {len(one) for one in sums} != {REWARDS}:
        return ()
    return tuple(sum(column) / pairs for column in zip(*sums, strict=True))


class Evaluations:
    """Evaluations of a run: the one under way, and when the next is due."""

    def __init__(self, wanted: bool, every: int, last: EvaluationRow | None = None) -> None:
        self.wanted, self.every = wanted, every  # every: steps; 0: only the first and the final one
        self.finished = last is not None and last.final  # the final one is done
        self.now: Evaluation | None = None
        self._last_step = last.step if last else -1

    def due(self, step: int) -> bool:
        if not self.wanted or self.now is not None:
            return False
        return self._last_step < 0 or (self.every > 0 and step // self.every > self._last_step // self.every)

    def begin(self, round: int, step: int, sessions: Sequence[str]) -> None:
        self.now = Evaluation(round, step, len(sessions), False, dict(enumerate(sessions)))
        self._last_step = step

    def assign(self, round: int, step: int, free: Sequence[str]) -> list[str]:
        """Assign missing parts of the final evaluation to `free` sessions. Returns those that got one."""
        if self.now is None and free:
            self.now = Evaluation(round, step, len(free), True)
        given = list(zip(self.now.unheld, free, strict=False)) if self.now else []
        for part, session in given:
            self.now.holders[part] = session  # type: ignore[union-attr]  # given is empty where there is none
        return [session for _, session in given]

    def lost(self, session: str) -> None:
        if self.now is not None and self.now.lost(session) and not self.now.final:
            self.again()

    def again(self) -> None:
        """Give up the evaluation under way; the next round begins another."""
        if self.now is not None:
            self.now, self._last_step = None, -1

    def finish(self) -> None:
        """End the evaluation under way: it is whole, or void."""
        if self.now is not None:
            self.finished = self.now.final
            self.now = None
