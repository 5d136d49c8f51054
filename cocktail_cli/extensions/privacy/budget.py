"""The budget of one peer in one run, by opacus' accountant (Renyi DP of the subsampled Gaussian mechanism).

    COCKTAIL_HOME/privacy/<digest of run and peer>.json     steps: [noise multiplier, sampling rate, count]

A step is on disk before its gradient is sent, so neither a crash nor a return begins anew. It names no row.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cocktail_cli.errors import Failure
from cocktail_cli.installation import command_to_add
from cocktail_cli.machine import home, lock_of, write_private
from transport.ledger import lock_exclusively
from transport.protocol import LedgerBusy

from .keys import Keys


def check_accountant() -> None:
    """Raise Failure where opacus is not installed."""
    if find_spec("opacus") is None:
        said = "opacus, which counts what private rows spend, is not installed"
        raise Failure("preflight", said, hints=(command_to_add("opacus"),))


def path_of(run: str, peer: str) -> Path:
    """Return the file of a peer's budget; names are other people's, so a digest of them."""
    return home() / "privacy" / f"{hashlib.sha256(f'{run}/{peer}'.encode()).hexdigest()[:24]}.json"


class Budget:
    """The privacy budget of one peer's rows, which this process alone spends until it is closed.

    Args:
        rate: probability with which a step takes each row.
        steps: over which the whole budget is to last; the noise follows from that.

    Raises Failure where another process spends it, it cannot be read, or no noise is enough for it.
    """

    def __init__(self, path: Path, terms: Keys, rate: float, steps: int) -> None:
        check_accountant()
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis import rdp
        from opacus.accountants.utils import get_noise_multiplier

        self.path, self.terms, self.rate = path, terms, rate
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_exclusively(lock_of(path))
        except LedgerBusy:
            said = "another process trains on the rows of this name"
            hints = ("give each peer of this machine its own name=, and rows of its own",)
            raise Failure("preflight", said, hints=hints) from None
        self._accountant, orders = RDPAccountant(), RDPAccountant.DEFAULT_ALPHAS

        def moments(noise: float, rate: float, count: int) -> Any:
            return rdp.compute_rdp(q=rate, noise_multiplier=noise, steps=count, orders=orders)

        def spent(moments: Any) -> float:
            return float(rdp.get_privacy_spent(orders=orders, rdp=moments, delta=terms.delta)[0])

        self._get = spent
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._accountant.history = read_history(path)
            least = self._get([0.0] * len(orders))  # of infinite noise, as this accountant counts
            if terms.epsilon <= least:
                said = f"privacy.epsilon {terms.epsilon:g} at delta {terms.delta:g}: no noise is enough"
                raise Failure("rejected", said, hints=(f"an epsilon above {least:.3g}",))
            self.noise: float = get_noise_multiplier(
                target_epsilon=terms.epsilon, target_delta=terms.delta, sample_rate=rate, steps=steps
            )
            on_error.pop_all()
        self._one = moments(self.noise, rate, 1)
        self._sum = sum((moments(*entry) for entry in self._accountant.history), 0 * self._one)

    @property
    def steps(self) -> int:
        """Count the steps that were taken."""
        return sum(count for _, _, count in self._accountant.history)

    @property
    def epsilon(self) -> float:
        """Return what is spent."""
        return self._get(self._sum) if self.steps else 0.0

    @property
    def spent(self) -> bool:
        """Tell whether one more step would exceed the budget."""
        return self._get(self._sum + self._one) > self.terms.epsilon

    def spend(self) -> None:
        """Count a step, on disk: what follows from it may then be seen."""
        self._accountant.step(noise_multiplier=self.noise, sample_rate=self.rate)
        write_private(self.path, json.dumps(self._accountant.history))
        self._sum = self._sum + self._one

    def close(self) -> None:
        self._lock.close()


def read_history(path: Path) -> list[tuple[float, float, int]]:
    """Read the steps that a file counts; none where there is no file. Raises Failure where it is damaged."""
    if not path.exists():
        return []
    with suppress(ValueError, TypeError):
        return [
            (float(noise), float(rate), int(count)) for noise, rate, count in json.loads(path.read_text())
        ]
    hints = (f"put back a copy of {path}; without it nobody knows what is spent",)
    raise Failure("altered", f"{path} does not say what these rows have spent", hints=hints)
