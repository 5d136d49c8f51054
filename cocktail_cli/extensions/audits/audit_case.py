"""An audited sample: what its peer and its auditors have found, and who of them is wrong.

An opinion is a gradient sketch: BITS bits, of which two computations of the same gradient differ in few, and
two of unrelated gradients in half. The first two opinions that agree are right, and whoever is far from both
of them is wrong. So one peer alone convicts nobody: its word against another's is decided by a third.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import combinations

BITS, SKETCH = 128, 16  # of a sketch; in bytes
LIMIT = 48  # bits in which two sketches of one gradient may differ: a cosine of 0.38
MOST_OPINIONS = 5  # after which a case is dropped


@dataclass(frozen=True)
class Ruling:
    """The end of a case, by machine."""

    right: tuple[str, ...] = ()  # the two that agree
    wrong: Collection[str] = ()


@dataclass(eq=False)
class Case:
    """A sample whose gradient is computed by one peer after the other until two agree."""

    peer: str  # that had the sample in its lease
    machine: str  # of that peer then: its name may be another's when the case is decided
    lease: int  # round of that lease, which seeds the sketches
    sample: int
    opinions: dict[str, bytes] = field(default_factory=dict)  # by machine, in their order
    auditor: str = ""  # the peer whose opinion is awaited; "": nobody's yet
    asked: int = -1  # the round in which somebody was asked last

    def ruling(self) -> Ruling | None:
        """Decide the case. None: another opinion is needed."""
        for pair in combinations(self.opinions, 2):
            if self.between(*pair) <= LIMIT:
                others = self.opinions.keys() - pair
                far = {one for one in others if all(self.between(one, right) > LIMIT for right in pair)}
                return Ruling(pair, far)
        return Ruling() if len(self.opinions) == MOST_OPINIONS else None

    def between(self, one: str, other: str) -> int:
        """Count the bits in which two opinions differ. No gradient at all agrees with nothing."""
        a, b = self.opinions[one], self.opinions[other]
        return differing(a, b) if any(a) and any(b) else BITS


def differing(one: bytes, other: bytes) -> int:
    """Count the bits in which two sketches differ."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()
