"""A peer's steps are too short, as its optimizer divides by the noise of its own few samples: by how much.

Adam divides by the root of v, the mean of g^2. The gradient of b of a round's B samples has the signal of the
round's mean gradient, and B / b times the variance:

    v of the mean gradient  =  M + N        M: square of the expected gradient; N: variance of the mean
    v of a peer             =  M + q N      q: B / b, averaged over steps as v is

So the mean of the peers' steps has the right direction, and is too short by the root of (M + q N) / (M + N):
the root of q where noise is all there is, 1 where samples agree. `factor` is that root. A peer takes the
recipe's rate times it, and the swarm makes the steps of one machine, whoever takes part with how many
samples. `norms` is the same of a gradient's norm, which `max_grad_norm` bounds.

M is the product of two gradients of different samples: of two parts of a lease or, where it is computed at
once, of this step and the one before. Noise cancels in both; to the latter what alternates between steps is
noise too, so the former goes first. N follows from |g|^2. Two numbers are kept for each of 64 places of the
vector, taken on 64 values each, so the cost is that of 4,096 parameters, whatever the size of the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PLACES = 64  # at equal distances in the vector; each stands for the parameter that it lies in
VALUES = 64  # of that parameter, drawn once
PART = 0.3  # of a lease's terms, at least: a part whose gradient is compared with that of the rest
PATIENCE = 32  # steps without such parts, after which gradients of two steps are compared
MOST = 4.0  # times its usual energy: as what a gradient counts at most


class GradientNoise:
    """Measures M and N of a vector of gradients.

    Args:
        offsets: start of each parameter in the vector, and P at the end (`Layout.offsets`).
        window: decay of the second moment, `adam_beta2`.
        device: of the samples.
    """

    def __init__(
        self, offsets: Sequence[int], window: float, device: torch.device | str | None = None
    ) -> None:
        self.positions = positions_of(offsets).to(device)  # (PLACES, VALUES)
        self.window = window
        self.factor = 1.0  # how much longer this peer's steps have to be
        self._moments = torch.zeros(2, PLACES, device=device)  # M and N, up to a factor that both share
        self._before = torch.zeros(PLACES, VALUES, device=device)  # gradient of the last step
        self._excess = 0.0  # q - 1, before it is divided by the weight of all steps
        self._steps = self._measured = self._compared = 0  # the last one; that was measured; that had parts
        self._energies = 0.0, 0.0  # M and N over all places
        self.begin(1.0)

    def begin(self, share: float) -> None:
        """Begin a gradient of this share b / B of the samples of a step."""
        self.share, self._scale = share, 1.0
        self._part: tuple[Tensor, float] | None = None

    def partly(self, done: float, gradient: Callable[[], Tensor]) -> None:
        """Note the gradient of this share of the lease's terms. `gradient` gives its sample."""
        if self._part is None and PART <= done <= 1 - PART:
            self._part = gradient(), done

    def scaled(self, factor: float) -> None:
        """Note that the gradient was multiplied by this."""
        self._scale *= factor

    @property
    def norms(self) -> float:
        """The norm of a gradient of this share over that of the whole step's."""
        signal, noise = self._energies
        return ((signal + noise / self.share) / (signal + noise)) ** 0.5 if signal + noise > 0 else 1.0

    def observe(self, gradient: Tensor) -> None:
        """Take in the sample of a gradient, (PLACES, VALUES) float32, as the optimizer steps with it."""
        self._steps += 1
        excess = self._excess + (1 - self.window) * (1 / self.share - 1 - self._excess)
        self._excess = float(torch.tensor(excess, dtype=torch.float32))  # as it is kept
        scale = self._usual(gradient)
        gradient = gradient * scale
        if self._part is not None:
            part, done = self._part[0] * (self._scale * scale), self._part[1]
            self._measure(gradient, part / done, (gradient - part) / (1 - done))
            self._compared = self._steps
        elif self._steps > 1 and (not self._compared or self._steps - self._compared > PATIENCE):
            self._measure(gradient, gradient, self._before)
        self._before = gradient
        if self._measured:
            self._conclude()

    def _usual(self, gradient: Tensor) -> Tensor | float:
        """Return the factor that makes a gradient of unusual energy one of some times the usual: no single
        batch decides."""
        if not self._measured:
            return 1.0
        weight = 1 - self.window**self._measured
        usual = (self._moments[0] + self._moments[1] / self.share).sum().clamp(min=0) / weight
        return (MOST * usual / gradient.square().sum().clamp(min=1e-38)).clamp(max=1.0).sqrt()

    def _measure(self, gradient: Tensor, one: Tensor, other: Tensor) -> None:
        """Measure by two gradients with noise of their own."""
        signal, energy = torch.linalg.vecdot(one, other), torch.linalg.vecdot(gradient, gradient)
        new = torch.stack([signal, self.share * (energy - signal)])
        self._moments.lerp_(new, 1 - self.window ** (self._steps - self._measured))
        self._measured = self._steps

    def _conclude(self) -> None:
        excess = self._excess / (1 - self.window**self._steps)  # q - 1
        signal, noise = self._moments  # (PLACES,) each; a single place's signal may come out negative
        mean, own = signal + noise, signal + (1 + excess) * noise
        shorter = torch.where(own > 0, mean / own, 1.0).clamp(-1, 1).mean()
        square, *energies = torch.stack([shorter, signal.sum(), noise.sum()]).tolist()
        self.factor = min(max(square, 1 / (1 + excess)), 1.0) ** -0.5
        self._energies = max(energies[0], 0.0), max(energies[1], 0.0)

    # ---- what is kept --------------------------------------------------------------------------------------

    def state(self) -> Tensor:
        """Return all that was measured, as one float32 vector, for `load`."""
        counts = [self._excess, float(self._steps), float(self._measured), float(self._compared)]
        return torch.cat([self._moments.view(-1), self._before.view(-1), self._moments.new_tensor(counts)])

    def load(self, state: Tensor) -> None:
        """Restore what `state` gave."""
        sizes = [2 * PLACES, PLACES * VALUES, 4]
        moments, before, counts = torch.split(state.to(self._before.device), sizes)
        self._moments, self._before = moments.view(2, PLACES), before.view(PLACES, VALUES)
        self._excess, *steps = counts.tolist()
        self._steps, self._measured, self._compared = map(int, steps)
        if self._measured:
            self._conclude()


NOISE_VALUES = 2 * PLACES + PLACES * VALUES + 4  # values of `GradientNoise.state`


def positions_of(offsets: Sequence[int]) -> Tensor:
    """Choose the positions that are sampled, (PLACES, VALUES) in the vector. They follow from the layout."""
    generator, size = torch.Generator().manual_seed(0), offsets[-1]
    rows = []
    for place in range(PLACES):
        number = bisect_right(offsets, (2 * place + 1) * size // (2 * PLACES)) - 1
        start, count = offsets[number], offsets[number + 1] - offsets[number]
        rows.append(start + torch.randint(count, (VALUES,), generator=generator))
    return torch.stack(rows)
