"""1F1B (Narayanan et al., 2019): the order of a stage's work on the micro-batches of a step. No tensors.

    first stage     FORWARD m (embeddings, layers), LOSS m (norm, head, and back again), BACK m (layers)
    other stages    FORWARD m, BACK m

A stage does what has arrived, gradients before losses before activations, each in the order of the
micro-batches. The first stage begins no more than `in_flight` before the gradient of the earliest is back, so
no stage holds the activations of more.
"""

from __future__ import annotations

from enum import IntEnum

PER_STAGE = 3  # micro-batches in flight for each stage, which keep all busy on lines without latency


class Work(IntEnum):
    """Work on one micro-batch; the least value comes first where there is a choice."""

    BACK = 0
    LOSS = 1
    FORWARD = 2


class StageSchedule:
    """The order of one stage's work on `count` micro-batches."""

    def __init__(self, count: int, in_flight: int, first: bool) -> None:
        if min(count, in_flight) < 1:
            raise ValueError(f"{count} micro-batches, {in_flight} in flight")
        self.count, self.in_flight, self.first = count, in_flight, first
        self._here: dict[Work, set[int]] = {work: set() for work in Work}
        if first:
            self._here[Work.FORWARD] = set(range(count))
        self._next = dict.fromkeys(Work, 0)

    def arrived(self, work: Work, micro_batch: int) -> bool:
        """Note that what this work needs is here; returns False where it was before."""
        if not 0 <= micro_batch < self.count or (work is Work.LOSS and not self.first):
            raise ValueError(f"{work.name} of micro-batch {micro_batch} of {self.count}")
        known = micro_batch in self._here[work]
        self._here[work].add(micro_batch)
        return not known

    def take(self) -> tuple[Work, int] | None:
        """Return the work to do now, which is then done; None: something must arrive first."""
        for work in Work:
            number = self._next[work]
            waits = self.first and work is Work.FORWARD and self.held >= self.in_flight
            if number in self._here[work] and not waits:
                self._next[work] += 1
                return work, number
        return None

    def is_done(self, micro_batch: int) -> bool:
        """Tell whether the gradient of a micro-batch has been through this stage."""
        return micro_batch < self._next[Work.BACK]

    @property
    def held(self) -> int:
        """Micro-batches whose forward pass was done and whose gradient has not come back."""
        return self._next[Work.FORWARD] - self._next[Work.BACK]

    @property
    def finished(self) -> bool:
        return self._next[Work.BACK] == self.count
