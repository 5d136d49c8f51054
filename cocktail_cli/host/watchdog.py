"""A run whose training loss stays above what its recipe bears is ended: it has diverged, and costs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cocktail_cli.errors import Failure

if TYPE_CHECKING:
    from recipes.config import Logging

BEFORE = "the folders in `snapshots` of the run's folder are models of before"


@dataclass
class Watchdog:
    """Sees the loss of each round that is committed."""

    threshold: float | None  # None: it bears anything
    patience: int  # rounds in a row
    above: int = 0

    @classmethod
    def of(cls, logging: Logging) -> Watchdog:
        return cls(logging.loss_watchdog_threshold, logging.loss_watchdog_patience)

    def see(self, loss: float | None) -> None:
        """Raises Failure (no_result) once it was above the threshold for long enough. A round without new
        gradients, which has no loss, is passed over.
        """
        if loss is None or self.threshold is None:
            return
        self.above = 0 if loss <= self.threshold else self.above + 1
        if self.above >= self.patience:
            above = f"above loss_watchdog_threshold {self.threshold:g} for {self.above} rounds"
            hints = ("a lower training.learning_rate", BEFORE)
            raise Failure("no_result", f"training loss {loss:.4g}, {above}", hints=hints)
