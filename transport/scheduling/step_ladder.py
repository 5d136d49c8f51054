"""Local steps of a round (H), adapted to what the lines carry. No clock, no I/O.

    need of a peer    local steps whose compute an exchange of its sparsest packets takes on its own line
                      (bandwidth_budget.py); the same whatever H is
    need of a round   the smallest that is enough for all peers but OUTLIERS of the work
    need of a block   the median of its BLOCK rounds

After each block H moves by one rung at most: up if the need is above H, down if the need is within SPARE of
the rung below. So

- on a steady line H comes to rest, also where needs vary by less than 1 / SPARE: what makes it rise from a
  rung and what makes it fall back to that rung are further apart than that;
- H follows from rung and need, and is monotone in both. Blocks end at the same rounds in every run. So lines
  that carry more never lead to a larger H;
- a round takes at most twice as long as the one before it, which the straggler deadline allows for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median_low

BLOCK = 5  # rounds: most of the arrivals that a straggler deadline remembers are then of the newest H
SPARE = 0.8  # of the lower rung
OUTLIERS = 0.25  # of the tokens of a round


@dataclass(frozen=True)
class StepLadder:
    """H of a run's next round; immutable, each committed round gives the next one."""

    rungs: tuple[int, ...]  # ascending; a single one is never left
    steps: int  # H: one of the rungs
    needs: tuple[float, ...] = ()  # of the rounds of this block, as far as known

    def committed(self, round: int, need: float) -> StepLadder:
        """Note the need of a round; 0: not known. The last round of a block may change H."""
        needs = (*self.needs, need) if need > 0 else self.needs
        if (round + 1) % BLOCK:
            return replace(self, needs=needs)
        known = 2 * len(needs) > BLOCK
        return StepLadder(self.rungs, self._after(median_low(needs)) if known else self.steps)

    def _after(self, need: float) -> int:
        at = self.rungs.index(self.steps)
        lower = self.rungs[max(0, at - 1)]
        if need > self.steps:
            return self.rungs[min(at + 1, len(self.rungs) - 1)]
        return lower if need <= SPARE * lower else self.steps


def need_of_round(peers: Iterable[tuple[float, int]]) -> float:
    """Return the need of a round from (need, tokens) of its peers; 0: not known.

    Peers whose own need is not known have no say.
    """
    known = sorted((need, tokens) for need, tokens in peers if need > 0 and tokens > 0)
    above = sum(tokens for _, tokens in known)
    allowed = OUTLIERS * above
    for need, tokens in known:
        above -= tokens
        if above <= allowed:
            return need
    return 0.0
