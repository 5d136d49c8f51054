"""A peer's steps are too short, as its optimizer divides by the noise of its own few samples: by how much.

Adam divides by the root of v, the mean of g^2. The gradient of b of a round's B samples has the signal of the
round's mean gradient, and B / b times the variance:

    v of the mean gradient  =  M + N        M: square of the expected gradient; N: variance of the mean
    v of a peer             =  M + q N      q: B / b, averaged over steps as v is

So the mean of the peers' steps has the right direction, and is too short by the root of (M + q N) / (M + N):
the root of q where noise is all there is, 1 where samples agree. `factor` is that root. A peer takes the
recipe's rate times it, and the swarm makes the steps of one machine, whoever takes part with how many
samples. `norms` is the same of a gradient's norm, which `max_grad_norm` bounds.

M is the product of two gradients of different samples: of the halves of a lease, now and then; where leases
have one sample, of this step and the one before. Noise cancels in both; to the latter what alternates between
steps is noise too. N follows from |g|^2. Two numbers are kept for each of 64 places of the vector, taken on
64 values each, so the cost is that of some thousand parameters, whatever the size of the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.weight_files import Layout

PLACES = 64  # at equal distances in the vector; each stands for the parameter that it lies in
VALUES = 64  # of that parameter, drawn once
RUN = 8  # of these are neighbours: memory is read in lines
NOISE_VALUES = 2 * PLACES + PLACES * VALUES + 5  # of `GradientNoise.state`
HALF = 0.1  # of a lease's terms, at least: what counts as a half
AT_FIRST, EVERY = 16, 16  # steps in which two gradients are compared
PATIENCE = 64  # steps without a lease's halves, after which they are those of two steps
TINY = 1e-38
MOST = 4.0  # times its usual energy: as what a gradient counts at most

Values = NDArray[np.float32]


def compared_in(step: int) -> bool:
    """Are the halves of a lease compared in this step of a peer? In all at first, then now and then."""
    return step < AT_FIRST or step % EVERY == 0


@dataclass(frozen=True)
class NoiseSums:
    """Sums over places of what is known of a gradient's noise; those of a replica's machines add up."""

    places: int = 0  # that have been measured
    shorter: float = 0.0  # (M + N) / (M + q N)
    signal: float = 0.0  # M
    noise: float = 0.0  # N
    least: float = 1.0  # 1 / q

    def __add__(self, other: NoiseSums) -> NoiseSums:
        return NoiseSums(
            self.places + other.places,
            self.shorter + other.shorter,
            self.signal + other.signal,
            self.noise + other.noise,
            min(self.least, other.least),
        )

    @property
    def factor(self) -> float:
        """Return how much longer the steps of this peer have to be."""
        square = self.shorter / self.places if self.places else 1.0
        return 1 / sqrt(min(max(square, self.least), 1.0))

    def norms(self, share: float) -> float:
        """Divide the norm of the gradient of a share of a step's samples by that of them all."""
        signal, noise = max(self.signal, 0.0), max(self.noise, 0.0)
        return sqrt((signal + noise / share) / (signal + noise)) if signal + noise > 0 else 1.0

    def told(self) -> dict[str, float]:
        """Return the sums by name."""
        return asdict(self)


class GradientNoise:
    """Measures M and N of a vector of gradients.

    Args:
        positions: of the values that are looked at, (places, VALUES) in the vector.
        window: decay of the second moment, `adam_beta2`.
        device: of the gradients.
    """

    def __init__(self, positions: Tensor, window: float, device: torch.device | str | None = None) -> None:
        self.positions = positions.to(device)
        self.window = window
        # samples of the gradient under way, and of the last step's
        self._gradient, self._before = torch.zeros(2, *positions.shape, device=device)
        self._moments = np.zeros((2, len(positions)), np.float32)  # M and N, times what both share
        self._excess = np.float32(0)  # q - 1, before it is divided by the weight of all steps
        # the last step; that was measured; that had halves; that `_before` is of
        self._steps = self._measured = self._compared = self._kept = 0
        self._sums: NoiseSums | None = None  # of all that was measured; None: not summed yet
        self.begin(1.0)

    def begin(self, share: float) -> None:
        """Begin a gradient of this share b / B of the samples of a step."""
        self.share, self._done = share, 0.0
        self._part: Tensor | None = None  # the gradient of the lease's first half
        self._taken = False

    def partly(self, done: float, gradient: Tensor) -> None:
        """Take the sample of a gradient as it is after this share of its terms: (places, VALUES) float32."""
        if HALF <= done <= 1 - HALF:
            self._part, self._done = gradient, done

    @property
    def wanted(self) -> bool:
        """True where the sample of the gradient under way is to be taken."""
        step = self._steps + 1
        pair = step <= AT_FIRST or step % EVERY in (0, EVERY - 1)
        return self._part is not None or (pair and self._in_pairs(step))

    def _in_pairs(self, step: int) -> bool:
        return not self._compared or step - self._compared > PATIENCE

    def take(self, gradient: Tensor) -> None:
        """Take the sample of the whole gradient: (places, VALUES)."""
        self._gradient.copy_(gradient)
        self._taken = True

    def scaled(self, factor: float) -> None:
        """Note that the gradient was multiplied by this since it was taken."""
        for sample, there in ((self._part, True), (self._gradient, self._taken)):
            if sample is not None and there and factor != 1:
                sample.mul_(factor)

    @property
    def sums(self) -> NoiseSums:
        """Sum up what the steps until now have shown."""
        if self._sums is None and not self._measured:
            self._sums = NoiseSums()
        elif self._sums is None:
            excess = self._mean_excess
            signal, noise = self._moments  # (places,) each; a single place's signal may come out negative
            mean, own = signal + noise, signal + (1 + excess) * noise
            shorter = np.divide(mean, own, out=np.ones_like(own), where=own > TINY).clip(-1, 1)
            ratio, squared, variance = (float(each.sum()) for each in (shorter, signal, noise))
            self._sums = NoiseSums(len(shorter), ratio, squared, variance, 1 / (1 + excess))
        return self._sums

    def observe(self) -> None:
        """Measure the gradient that was taken, as the optimizer steps with it."""
        self._steps += 1
        excess = 1 / self.share - 1
        self._excess += np.float32(1 - self.window) * (np.float32(excess) - self._excess)
        if abs(self._mean_excess - excess) > 1e-3 * excess:  # else q is what it was
            self._sums = None
        if not self._taken:
            return
        gradient, part = self._gradient, self._part
        if part is not None:  # the halves a and c, whose sum the gradient is, are shares of the terms
            energy, both, first = products((gradient, gradient), (part, gradient), (part, part))
            self._compared = self._steps
            self._measure(energy, (both - first) / (self._done * (1 - self._done)), energy)
        elif 0 < self._kept == self._steps - 1 and self._in_pairs(self._steps) and self._pair_ends:
            before = self._before
            energy, both, other = products((gradient, gradient), (gradient, before), (before, before))
            self._measure(energy, both, other)
        self._before, self._gradient, self._kept = gradient, self._before, self._steps
        self._part, self._taken = None, False

    @property
    def _pair_ends(self) -> bool:
        return self._steps <= AT_FIRST or self._steps % EVERY == 0

    def _measure(self, energy: Values, signal: Values, other: Values) -> None:
        """Measure by the energy of a gradient and the product of two with noise of their own, (places,).

        No single batch decides: an unusual energy, also of the `other`, counts as some times the usual. After
        some steps no measurement is more than an eighth of them all.
        """
        own = its = weight = 1.0
        if self._measured:
            most = MOST * max((self._moments[0] + self._moments[1] / self.share).sum(), 0.0)
            own, its = (min(most / max(each.sum(), TINY), 1.0) for each in (energy, other))
            weight = (1 - self.window ** (self._steps - self._measured)) / (1 - self.window**self._steps)
            weight = weight if self._steps <= AT_FIRST else min(weight, 1 / 8)
        signal = signal * sqrt(own * its)
        new = np.stack([signal, self.share * (own * energy - signal)])
        self._moments += np.float32(weight) * (new - self._moments)
        self._measured, self._sums = self._steps, None

    @property
    def _mean_excess(self) -> float:
        """Return q - 1."""
        return float(self._excess) / (1 - self.window**self._steps)

    # ---- what is kept --------------------------------------------------------------------------------------

    def state(self) -> Tensor:
        """Return all that was measured, as one float32 vector, for `load`."""
        counts = [self._excess, self._steps, self._measured, self._compared, self._kept]
        own = torch.from_numpy(np.concatenate([self._moments.reshape(-1), np.array(counts, np.float32)]))
        return torch.cat([own.to(self._before.device), self._before.view(-1)])

    def load(self, state: Tensor) -> None:
        """Restore what `state` gave."""
        size = self._moments.size
        own = state[: size + 5].cpu().numpy()
        self._moments, self._excess = own[:size].reshape(self._moments.shape).copy(), np.float32(own[size])
        self._steps, self._measured, self._compared, self._kept = (int(count) for count in own[size + 1 :])
        self._before.copy_(state[size + 5 :].view_as(self._before))
        self._sums = None


def products(*pairs: tuple[Tensor, Tensor]) -> Sequence[Values]:
    """Compute the inner products of the rows of pairs, (n,) of (n, m) each, without temporaries as large."""
    rows = [torch.bmm(one[:, None], other[:, :, None]).view(-1) for one, other in pairs]
    return [*torch.stack(rows).cpu().numpy()]


def positions_of(layout: Layout) -> Tensor:
    """Choose the positions to look at, (PLACES, VALUES) in the vector: they follow from the layout."""
    generator, offsets = torch.Generator().manual_seed(0), layout.offsets
    rows = []
    for number in parameters_of_places(layout):
        start, count = offsets[number], offsets[number + 1] - offsets[number]
        first = torch.randint(max(count - RUN + 1, 1), (VALUES // RUN, 1), generator=generator)
        rows.append(start + ((first + torch.arange(RUN)) % count).view(-1))
    return torch.stack(rows)


def parameters_of_places(layout: Layout) -> list[int]:
    """Number the parameter that each place lies in."""
    middles = ((2 * place + 1) * layout.size // (2 * PLACES) for place in range(PLACES))
    return [bisect_right(layout.offsets, middle) - 1 for middle in middles]


def positions_within(whole: Layout, own: Layout) -> Tensor:
    """Choose the same positions in the vector of some of the parameters: (places in these, VALUES)."""
    at: Mapping[str, int] = dict(zip(own.names, own.offsets, strict=False))
    rows = []
    for number, row in zip(parameters_of_places(whole), positions_of(whole), strict=True):
        if (name := whole.names[number]) in at:
            rows.append(row - whole.offsets[number] + at[name])
    return torch.stack(rows) if rows else torch.zeros(0, VALUES, dtype=torch.int64)
